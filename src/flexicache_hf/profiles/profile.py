"""Head profiles: which KV heads of a model are unstable (section 3 of the paper).

A profile is data. It is written and read as JSON, never unpickled, and checked against the model.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..errors import FlexiCacheWarning
from ..models.kv_heads import head_dim, kv_heads
from .fields import validate
from .stability import WINDOW, Heads, StabilityVote, rank_heads

FILE_NAME = "head_profile.json"
SCHEMA = 2  # 1 held the first four fields only

Matrix = tuple[tuple[float | None, ...], ...]  # [L][H_kv]; None: a head that was not measured


def tool_version() -> str:
    """`flexicache_hf <version>`, for the record of what made a profile."""
    try:
        return f"flexicache_hf {version('flexicache_hf')}"
    except PackageNotFoundError:  # run from a source tree that is not installed
        return "flexicache_hf (not installed)"


@dataclass(frozen=True)
class HeadProfile:
    """The unstable KV heads of one model, and how they were found.

    A profile is a function of model, tasks, K, page size, W and M, so it carries all of these.
    Fields that an unmeasured profile (a list of heads from elsewhere) cannot know are None.

    Raises:
        ValueError: a field is wrong; the message names it, what was found and what was expected.
    """

    num_layers: int
    num_kv_heads: int
    unstable_heads: Heads  # sorted; M is their number
    provenance: dict[str, Any] = field(default_factory=dict)
    model_id: str | None = None
    revision: str | None = None
    model_type: str | None = None
    head_dim: int | None = None
    tasks: tuple[str, ...] = ()
    top_k_pages: int | None = None  # K
    page_size: int | None = None  # tokens
    window: int | None = None  # W, decode steps
    num_windows: int | None = None  # windows that voted
    stability: Matrix | None = None  # mean RCO over all windows
    votes: Matrix | None = None  # windows that named the head among their M least stable
    task_heads: dict[str, Heads] = field(default_factory=dict)  # the vote of each task alone
    tool_version: str = field(default_factory=tool_version)

    def __post_init__(self) -> None:
        validate(self)

    # ---- made from

    @classmethod
    def from_unstable_heads(
        cls, config: Any, heads: Iterable[tuple[int, int]], **provenance: Any
    ) -> HeadProfile:
        """A profile of `(layer, kv_head)` pairs that are known already.

        Args:
            config: the model's transformers config.
            heads: the unstable heads, in any order.
            provenance: anything JSON can hold about where they come from.
        """
        pairs = tuple(sorted({(int(layer), int(head)) for layer, head in heads}))
        return cls(unstable_heads=pairs, provenance=provenance, **model_facts(config))

    @classmethod
    def from_vote(
        cls,
        config: Any,
        vote: StabilityVote,
        *,
        top_k_pages: int,
        page_size: int,
        window: int = WINDOW,
        **provenance: Any,
    ) -> HeadProfile:
        """A profile of the windows counted so far, of records or of a generation under way.

        Args:
            config: the model's transformers config.
            vote: over `[L, H_kv]` of that model; NaN stability marks heads that were not measured.
            top_k_pages: K of the page sets.
            page_size: tokens.
            window: W.
            provenance: anything JSON can hold.

        Raises:
            ValueError: no window has been counted, or the vote is about another shape of model.
        """
        return cls(
            unstable_heads=tuple(sorted(vote.unstable_heads())),
            provenance=provenance,
            top_k_pages=top_k_pages,
            page_size=page_size,
            window=window,
            **vote_facts(vote),
            **model_facts(config),
        )

    @classmethod
    def from_dict(cls, document: Any) -> HeadProfile:
        """Inverse of `to_dict`; takes every schema up to this version's.

        Raises:
            ValueError: not a profile, of a newer schema, or with a wrong, unknown or missing field.
        """
        if not isinstance(document, dict) or "schema" not in document:
            raise ValueError(
                "not a head profile: found no 'schema' field; expected the JSON object that "
                "HeadProfile.save_pretrained writes"
            )
        values = dict(document)
        schema = values.pop("schema")
        if type(schema) is not int or not 1 <= schema <= SCHEMA:
            raise ValueError(
                f"profile.schema is {schema!r}, expected 1 to {SCHEMA}; a newer schema needs a "
                "newer flexicache_hf"
            )
        named = values.pop("num_unstable", None)
        known = {item.name for item in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise ValueError(
                f"profile has the unknown fields {unknown}; schema {SCHEMA} has {sorted(known)}"
            )
        required = {"num_layers", "num_kv_heads", "unstable_heads"}
        if missing := sorted(required - set(values)):
            raise ValueError(f"profile lacks the fields {missing}; expected at least these")
        if schema == 1:
            values.setdefault("tool_version", "unknown (schema 1)")
        provenance = values.pop("provenance", {})
        frozen = {name: _frozen(value) for name, value in values.items()}
        profile = cls(**frozen, provenance=provenance)
        if named is not None and named != len(profile.unstable_heads):
            raise ValueError(
                f"profile.num_unstable is {named!r}, expected {len(profile.unstable_heads)}, the "
                "number of pairs in unstable_heads; the file was changed by hand or cut short"
            )
        return profile

    @classmethod
    def from_pretrained(
        cls,
        source: str | Path,
        *,
        revision: str | None = None,
        cache_dir: str | Path | None = None,
        local_files_only: bool = False,
        token: str | bool | None = None,
    ) -> HeadProfile:
        """Load a profile from a directory, a file, or a repository on the Hub.

        Args:
            source: directory that holds `head_profile.json`, the file itself, or a repository id.
            revision: branch, tag or commit of the repository.
            cache_dir: the Hub cache, if not the usual one.
            local_files_only: use the Hub cache only; so does the environment's `HF_HUB_OFFLINE=1`.
            token: for private repositories.

        Raises:
            FileNotFoundError: no profile there, or not reachable and not in the cache.
            ValueError: the file is not a valid profile.
        """
        from .hub import find_file

        path = find_file(source, revision, cache_dir, local_files_only, token)
        try:
            return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from error

    @classmethod
    def for_model(cls, model: Any, *, hub: bool = True) -> HeadProfile | None:
        """The profile that belongs to a model, or None. Looked for in this order:

        1. bundled with this package, by the model's id;
        2. beside the model: `head_profile.json` in its local directory or in its Hub repository;
        3. by convention: the repository `<namespace>/<model name>-head-profile`, where the
           environment variable `FLEXICACHE_PROFILE_NAMESPACE` names the namespace.

        Args:
            model: a transformers model, its config, its id on the Hub or its local directory.
            hub: whether to ask the Hub. What the Hub once answered, also "there is none", is taken
                from the local Hub cache; `from_pretrained` asks again.

        Raises:
            ValueError: the profile found is invalid or does not fit the model's config.
        """
        from .hub import look_up

        return look_up(model, hub=hub)

    # ---- used

    def check(self, config: Any) -> None:
        """Check that this profile fits the model of `config`.

        Raises:
            ValueError: it was made for another model.

        Warns:
            FlexiCacheWarning: same shape, other name; right for a fine-tune of the named model.
        """
        model = model_facts(config)
        for name in ("num_layers", "num_kv_heads", "head_dim", "model_type"):
            found, expected = getattr(self, name), model[name]
            if found is not None and found != expected:
                raise ValueError(
                    f"profile.{name} is {found!r}, but the model has {expected!r}: this profile "
                    f"was made for another model{f' ({self.model_id})' if self.model_id else ''}; "
                    "take one made for this model, or make one with `flexicache profile collect`"
                )
        name = model["model_id"]
        if self.model_id and name and not Path(name).exists() and _base(name) != self._base_name:
            warnings.warn(
                f"profile.model_id is {self.model_id!r}, but the model is {name!r}: fine if that "
                "is a fine-tune of it, otherwise make its own profile",
                FlexiCacheWarning,
                stacklevel=2,
            )

    def unstable_in(self, layer: int) -> tuple[int, ...]:
        """KV heads of `layer` that are unstable, ascending."""
        return tuple(head for at, head in self.unstable_heads if at == layer)

    @property
    def num_heads(self) -> int:
        """KV heads that can be unstable: the measured ones, or all if none was measured."""
        if self.stability is None:
            return self.num_layers * self.num_kv_heads
        return sum(value is not None for row in self.stability for value in row)

    def ranked_heads(self) -> Heads:
        """All measured heads, least stable first: by votes, then stability, then position.

        Raises:
            ValueError: the profile carries no stability.
        """
        if self.stability is None:
            raise ValueError(
                "profile.stability is missing: this profile only lists heads, so nothing can be "
                "chosen by stability; use a measured profile"
            )
        scores = _tensor(self.stability)
        counts = _tensor(self.votes) if self.votes is not None else torch.zeros_like(scores)
        return rank_heads(counts.nan_to_num(), scores)

    def with_unstable_fraction(self, fraction: float) -> HeadProfile:
        """The same measurement with another share of unstable heads (0 to 1, rounded to heads).

        At the share that was measured this is the profile itself. Votes were cast for the measured
        M: heads that no window named follow in the order of their stability.
        """
        if not 0 <= fraction <= 1:
            raise ValueError(f"fraction is {fraction}, expected a share of heads from 0 to 1")
        heads = self.ranked_heads()
        chosen = tuple(sorted(heads[: round(fraction * len(heads))]))
        note = {**self.provenance, "unstable_fraction": fraction}
        return replace(self, unstable_heads=chosen, provenance=note)

    def rank_periods(self, periods: Sequence[int] = (4, 8, 16, 32)) -> tuple[tuple[int, ...], ...]:
        """Rank period of every head in decode steps, `[L][H_kv]`.

        Unstable (and unmeasured) heads get 1. The stable heads, least stable first, are split into
        equal groups, one for each period.
        """
        if not periods or list(periods) != sorted(periods) or min(periods) < 1:
            raise ValueError(f"periods is {tuple(periods)}, expected ascending positive steps")
        unstable = set(self.unstable_heads)
        stable = [head for head in self.ranked_heads() if head not in unstable]
        result = [[1] * self.num_kv_heads for _ in range(self.num_layers)]
        for index, (layer, head) in enumerate(stable):
            result[layer][head] = periods[index * len(periods) // len(stable)]
        return tuple(map(tuple, result))

    # ---- kept

    def to_dict(self) -> dict[str, Any]:
        """The JSON document, of the newest schema."""
        document: dict[str, Any] = {"schema": SCHEMA, "num_unstable": len(self.unstable_heads)}
        document |= {item.name: getattr(self, item.name) for item in fields(self)}
        return document

    def save_pretrained(self, directory: str | Path) -> Path:
        """Write `head_profile.json` into `directory` (made if missing); returns its path."""
        path = Path(directory) / FILE_NAME
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(self.to_json(), encoding="utf-8")
        return path

    def to_json(self) -> str:
        """The document as text, a row of a matrix or of a mapping to a line."""
        lines = [
            f" {json.dumps(key)}: {_rows(value)}"
            for key, value in self.to_dict().items()
            if value is not None
        ]
        return "{\n" + ",\n".join(lines) + "\n}\n"

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        commit_message: str = "Add head profile",
    ) -> str:
        """Upload the profile with a generated model card (tables and plots); returns the commit's
        address. The repository is made if it does not exist. Needs matplotlib."""
        from .hub import push

        return push(self, repo_id, private, revision, token, commit_message)

    @property
    def _base_name(self) -> str:
        return _base(self.model_id or "")


def model_facts(config: Any) -> dict[str, Any]:
    """The fields of a profile that come from a transformers config."""
    text = config.get_text_config(decoder=True)
    return {
        "num_layers": text.num_hidden_layers,
        "num_kv_heads": kv_heads(text),
        "head_dim": head_dim(text),
        "model_type": text.model_type,
        "model_id": getattr(config, "_name_or_path", "") or None,
        "revision": getattr(config, "_commit_hash", None),
    }


def vote_facts(vote: StabilityVote) -> dict[str, Any]:
    """The fields of a profile that come from a vote's count."""
    measured = ~vote.stability.isnan()
    return {
        "num_windows": vote.num_windows,
        "stability": _matrix(vote.stability, measured),
        "votes": _matrix(vote.votes, measured),
    }


def _matrix(values: torch.Tensor, measured: torch.Tensor) -> Matrix:
    return tuple(
        tuple(value if known else None for value, known in zip(row, mask))
        for row, mask in zip(values.tolist(), measured.tolist())
    )


def _base(name: str) -> str:
    """Mirrors keep the name under another owner, so owners are not compared."""
    return name.rstrip("/").split("/")[-1].lower()


def _tensor(matrix: Matrix) -> torch.Tensor:
    rows = [[float("nan") if value is None else value for value in row] for row in matrix]
    return torch.tensor(rows, dtype=torch.float64)


def _frozen(value: Any) -> Any:
    """JSON's lists as tuples, at every depth that a profile has."""
    if isinstance(value, list):
        return tuple(_frozen(item) for item in value)
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return value


def _rows(value: Any) -> str:
    if isinstance(value, dict) and value:
        items = [f"{json.dumps(key)}: {json.dumps(item)}" for key, item in value.items()]
        return "{\n  " + ",\n  ".join(items) + "\n }"
    if isinstance(value, tuple) and value and isinstance(value[0], tuple) and len(value[0]) != 2:
        return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"
    return json.dumps(value)
