"""What a method is: a frozen dataclass that opens sessions, and a selector that does the work.

`select` decides which cached positions a decode step attends; the attention under that mask is
exact. The prompt is dense unless a method says otherwise. Keys and values all stay in the cache:
an evicting method keeps an `alive` mask that never regains a position, so its accuracy is exactly
that of a cache which dropped them, and the ledger counts what such a cache would hold.

A row of the batch is one sequence: padding is cut off before a selector sees it, so that pages,
ranks and counts of a padded row equal those of the row alone.
"""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from .attention import switched
from .cache import MaskCache
from .ledger import Footprint, Tokens
from .views import Prompt, Step


class Selector:
    """One method on one model. It holds what is fixed for the model; everything that changes with
    the tokens is in the state, one per layer and row."""

    def hooks(self, model: Any) -> list[Any]:
        """Register forward hooks the method needs; the session removes the returned handles."""
        return []

    def adjust_prompt(self, prompt: Prompt, output: Tensor) -> None:
        """Overwrite parts of the dense prompt attention `[T, H_q, Dv]`, for sparse prefill."""

    def begin(self, prompt: Prompt) -> Any:
        """The state at the end of the prompt."""
        return None

    def select(self, step: Step, state: Any) -> Tensor:
        """Positions this step attends, bool `[H_kv, T]` or `[H_q, T]`."""
        raise NotImplementedError

    def after(self, step: Step, state: Any, weights: Tensor) -> None:
        """Called with the attention weights `[H_q, T]` of the step, for methods that evict."""

    def footprint(self, step: Step, state: Any, mask: Tensor) -> Footprint:
        """The step's accounting, before `after`; everything resident unless overridden."""
        return Footprint(resident=step.length)

    def __deepcopy__(self, memo: dict[int, Any]) -> Selector:
        return self  # fixed per model: copies of a cache share it


@dataclass(frozen=True)
class Method:
    """A method with its parameters. `budget` is in tokens per head, the current one included."""

    budget: int

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    gqa: ClassVar[str]  # which heads choose together, and how a group is combined
    accounting: ClassVar[str]  # what the budget means

    def __post_init__(self) -> None:
        if self.budget < 1:
            raise ValueError(f"budget is {self.budget}, expected at least 1 token")

    @property
    def replays(self) -> bool:
        """Whether `new_cache` takes a recorded prompt (see `recording`): the method's prompt must
        be dense."""
        return True

    def notes(self) -> list[str]:
        """What a reader of a table must know about these options, in words."""
        return []

    def resolved(self) -> dict[str, Any]:
        """What the options come to where they leave something to a default of the package, which
        may be another in a later version."""
        return {}

    @property
    def label(self) -> str:
        """The method's name in tables."""
        notes = self.notes()
        return self.title + (f" ({', '.join(notes)})" if notes else "")

    def selector(self, model: Any) -> Selector:
        raise NotImplementedError

    def session(self, model: Any) -> Session:
        """A context in which `model` runs this method."""
        return MaskSession(self, model)


class Session:
    """`with method.session(model) as session`: the model's attention is switched inside."""

    def __init__(self, method: Method, model: Any) -> None:
        self.method = method
        self.model = model
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        with ExitStack() as stack:  # undone at once if entering fails halfway
            self._enter(stack)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def _enter(self, stack: ExitStack) -> None:
        raise NotImplementedError

    def new_cache(self, prompt: MaskCache | None = None) -> Any:
        """A fresh cache for one prompt (one batch); the first forward is the prompt.

        With a recorded `prompt` (see `recording`) the cache holds it already.
        """
        raise NotImplementedError

    def tokens(self, cache: Any = None) -> Tokens:
        """The accounting of `cache`, by default the newest one of this session."""
        raise NotImplementedError

    def _refuse_unless_replays(self) -> None:
        if not self.method.replays:
            raise ValueError(
                f"{self.method.label} does not take a recorded prompt: run the prompt itself"
            )


class MaskSession(Session):
    """Methods in mask form: our attention function over a full cache.

    Every token after the first forward is a decode step. A forward of n tokens over a filled cache
    is n steps, exactly as if they came one by one, but reads the weights only once.
    """

    _selector: Selector | None = None
    _newest: MaskCache | None = None

    def _enter(self, stack: ExitStack) -> None:
        shared = getattr(
            self.model.config.get_text_config(decoder=True), "num_kv_shared_layers", None
        )
        if shared:
            raise ValueError(
                f"the last {shared} layers of {type(self.model).__name__} read the keys of earlier "
                "layers, but a method in mask form has one state for each layer's own keys: run "
                "dense (without a method) and `flexicache`, which know shared keys"
            )
        selector = self.method.selector(self.model)
        stack.callback(setattr, self, "_selector", None)
        for handle in selector.hooks(self.model):
            stack.callback(handle.remove)
        stack.enter_context(switched(self.model))
        self._selector = selector

    def new_cache(self, prompt: MaskCache | None = None) -> MaskCache:
        if self._selector is None:
            raise RuntimeError("new_cache() outside the session: use it inside `with session`")
        cache = MaskCache(self.model.config, self._selector)
        if prompt is not None:
            self._refuse_unless_replays()
            cache.replay(prompt)
        self._newest = cache
        return cache

    def tokens(self, cache: MaskCache | None = None) -> Tokens:
        cache = cache or self._newest
        if cache is None:
            raise RuntimeError("tokens() before new_cache(): there is nothing to account for")
        return cache.ledger.tokens()
