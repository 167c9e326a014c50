"""From the parts of a prompt to token ids, with the place where the question starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eval.tasks.base import Prompt


@dataclass(frozen=True)
class Encoded:
    """Token ids of a whole prompt; the first `split` of them come before the question."""

    ids: list[int]
    split: int


def render(prompt: Prompt, tokenizer: Any) -> tuple[str, bool]:
    """The text for the model, and whether the tokenizer must add its special tokens to it.

    A chat template brings its own. Templates that refuse a system turn (Gemma) get the system text
    at the head of the user's turn; without a template it comes first, then a blank line.
    """
    if not (prompt.chat and getattr(tokenizer, "chat_template", None)):
        return "\n\n".join(filter(None, (prompt.system, prompt.text))) + _cue(prompt), True
    user = {"role": "user", "content": prompt.text}
    try:
        turns = [{"role": "system", "content": prompt.system}, user] if prompt.system else [user]
        text = _apply(tokenizer, turns)
    except Exception as error:
        if not prompt.system or type(error).__name__ != "TemplateError":
            raise
        text = _apply(tokenizer, [user | {"content": f"{prompt.system}\n\n{prompt.text}"}])
    return text + prompt.cue, False


def encode(prompt: Prompt, tokenizer: Any) -> Encoded:
    """Ids of the rendered prompt. Both protocols see the same ids: the text is tokenised once and
    `split` is found through character offsets, a token across the border counting as question.

    Raises:
        ValueError: the tokenizer has no offsets, or its template changed the question.
    """
    if not tokenizer.is_fast:
        raise ValueError(f"{type(tokenizer).__name__} has no offsets; use a fast tokenizer")
    text, special = render(prompt, tokenizer)
    coded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True, verbose=False)
    ids = list(coded.input_ids)
    start = text.rfind(prompt.question.strip())
    if start < 0:
        raise ValueError("the chat template changed the question's text, so it cannot be found")
    before = sum(1 for _, end in coded.offset_mapping if end <= start)
    if not prompt.document:
        before = len(ids)  # nothing to cache apart
    return Encoded(ids, min(before, len(ids)))


def _cue(prompt: Prompt) -> str:
    return f"\n{prompt.cue}" if prompt.cue else ""


def _apply(tokenizer: Any, turns: list[dict[str, str]]) -> str:
    return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))


def stop_ids(model: Any, tokenizer: Any, *, newline: bool = False) -> set[int]:
    """Every token that ends an answer: the model's list, the tokenizer's, and ends of turn.

    Llama 3 needs all of them; text that runs on lowers F1. `newline` adds the line break (samsum).
    """
    named = model.generation_config.eos_token_id
    ids = set(named if isinstance(named, list) else [named]) | {tokenizer.eos_token_id}
    vocabulary = tokenizer.get_vocab()
    ends = ("<|eot_id|>", "<|end_of_text|>", "<|im_end|>", "<end_of_turn>", "<|end|>")
    ids |= {vocabulary[token] for token in ends if token in vocabulary}
    if newline:
        ids.add(tokenizer.encode("\n", add_special_tokens=False)[-1])
    return {token for token in ids if token is not None}
