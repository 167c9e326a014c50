import pytest
import torch
from transformers import DynamicCache

from eval import fidelity
from eval.decode import Stream, cache_argument, complete, complete_batch, next_token
from eval.fidelity import compare
from eval.methods import build

PROMPTS = [[(7 * i + n) % 250 for i in range(n)] for n in (60, 33, 90)]


def generated(model, ids, count, min_new=0):
    """transformers' own greedy answer."""
    inputs = torch.tensor([ids])
    mask = torch.ones_like(inputs)
    extra = {"min_new_tokens": min_new} if min_new else {}
    out = model.generate(
        inputs, attention_mask=mask, max_new_tokens=count, do_sample=False, **extra
    )
    return [token for token in out[0, len(ids) :].tolist() if token != 256]


def answered(model, ids, split, count, stop=frozenset({256})):
    stream = Stream(model, DynamicCache(config=model.config))
    logits = stream.prefill(ids[:split])
    if split < len(ids):
        logits = stream.feed(ids[split:])[-1]
    return complete(stream, logits, set(stop), count)


@pytest.mark.parametrize("ids", PROMPTS, ids=len)
def test_both_protocols_of_dense_are_generate(tiny_model, ids):
    expected = generated(tiny_model, ids, 12)
    assert answered(tiny_model, ids, len(ids), 12) == expected
    assert answered(tiny_model, ids, 20, 12) == expected


def test_a_padded_batch_gives_every_row_its_own_answer(tiny_model):
    cache = DynamicCache(config=tiny_model.config)
    found = complete_batch(tiny_model, cache, PROMPTS, {256}, 12)
    assert found == [generated(tiny_model, ids, 12) for ids in PROMPTS]


def test_stop_and_least_length(tiny_model):
    ids = PROMPTS[0]
    answer = answered(tiny_model, ids, len(ids), 12)
    stop = {answer[0], 256}
    assert answered(tiny_model, ids, len(ids), 12, stop) == []
    stream = Stream(tiny_model, DynamicCache(config=tiny_model.config))
    longer = complete(stream, stream.prefill(ids), stop, 12, min_new=2)
    assert len(longer) >= 2
    assert not stop & set(longer)
    cache = DynamicCache(config=tiny_model.config)
    rows = complete_batch(tiny_model, cache, PROMPTS[:2], stop, 12, min_new=2)
    assert rows[0] == longer
    assert min(map(len, rows)) >= 2


def test_several_steps_in_one_forward_are_the_same_steps(tiny_model):
    method = build("quest", 32)
    found = []
    for several in (False, True):
        with method.session(tiny_model) as session:
            stream = Stream(tiny_model, session.new_cache(), several_steps=several)
            stream.prefill(PROMPTS[2])
            found.append((stream.feed(PROMPTS[1] * 2), session.tokens(stream.cache)))
    torch.testing.assert_close(found[0][0], found[1][0], atol=1e-4, rtol=1e-4)
    assert found[0][1] == found[1][1]


def dense_reference(model, ids, steps, stop, folder):
    """By transformers' own cache and attention."""

    file = fidelity.ReferenceFile.of(folder, model, ids, steps, stop)
    if not file.exists():
        stream = Stream(model, DynamicCache(config=model.config))
        file.make(stream, stream.prefill(ids), steps, stop)
    return file.load()


def full_kl(model, stream, reference, ids):
    """KL over the whole vocabulary, from a dense run of its own."""
    dense = Stream(model, DynamicCache(config=model.config))
    dense.prefill(ids)
    p = dense.feed(reference.tokens[:-1].tolist()).log_softmax(-1)
    q = stream.feed(reference.tokens[:-1].tolist()).log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def stream_of(session, model, ids):
    stream = Stream(model, session.new_cache())
    stream.prefill(ids)
    return stream


@pytest.mark.parametrize("top", [1024, 257, 40])
def test_kl_is_exact_over_all_outcomes_and_else_a_lower_bound(
    tiny_model, tmp_path, monkeypatch, top
):
    monkeypatch.setattr(fidelity, "TOP", top)
    ids = PROMPTS[2]
    reference = dense_reference(tiny_model, ids, 10, {256}, tmp_path)
    with build("streamingllm", 32).session(tiny_model) as session:
        found = torch.tensor(compare(stream_of(session, tiny_model, ids), reference).kl)
        exact = full_kl(tiny_model, stream_of(session, tiny_model, ids), reference, ids)
    assert exact.mean() > 1e-4
    if top >= 257:
        torch.testing.assert_close(found, exact, atol=1e-5, rtol=1e-3)
    else:
        assert (found <= exact + 1e-6).all()
        assert (found > 0.1 * exact).all()


def test_dense_is_its_own_reference(tiny_model, tmp_path):
    ids = PROMPTS[0]
    reference = dense_reference(tiny_model, ids, 8, {256}, tmp_path)
    assert reference.steps == 8
    with build("dense", 1).session(tiny_model) as session:
        found = compare(stream_of(session, tiny_model, ids), reference)
    assert max(map(abs, found.kl)) < 1e-5
    assert found.means()["top1"] == 1
    assert found.means()["nll"] == pytest.approx(-float(reference.logprobs[:, 0].mean()), abs=1e-4)


def test_reference_is_kept_and_suppresses_end_tokens(tiny_model, tmp_path):
    ids = PROMPTS[0]
    first = dense_reference(tiny_model, ids, 6, {256}, tmp_path)
    stop = {256, int(first.tokens[2])}
    other = dense_reference(tiny_model, ids, 6, stop, tmp_path)
    assert not stop & set(other.tokens.tolist())
    files = {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    assert len(files) == 2
    again = dense_reference(tiny_model, ids, 6, {256}, tmp_path)
    assert torch.equal(again.logprobs, first.logprobs)
    assert files == {path: path.stat().st_mtime_ns for path in tmp_path.iterdir()}


def test_cache_argument_and_bans(tiny_model):
    assert cache_argument(tiny_model) in ("cache", "past_key_values")
    logits = torch.tensor([0.0, 3.0, 2.0])
    assert next_token(logits) == 1
    assert next_token(logits, [1]) == 2
