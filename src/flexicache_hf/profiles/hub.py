"""Where head profiles are found (package, model directory, Hub) and how they get there."""

from __future__ import annotations

import os
import tempfile
from importlib.resources import as_file, files
from pathlib import Path
from typing import Any

from huggingface_hub import (
    HfApi,
    get_hf_file_metadata,
    hf_hub_download,
    hf_hub_url,
    try_to_load_from_cache,
)
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from .profile import FILE_NAME, HeadProfile

LOOK_UP_SECONDS = 5.0
NAMESPACE_VARIABLE = "FLEXICACHE_PROFILE_NAMESPACE"


def find_file(
    source: str | Path,
    revision: str | None,
    cache_dir: str | Path | None,
    local_files_only: bool,
    token: str | bool | None,
) -> Path:
    """The profile's file; see `HeadProfile.from_pretrained`."""
    path = Path(source)
    if path.is_file():
        return path
    if path.is_dir():
        if (path / FILE_NAME).is_file():
            return path / FILE_NAME
        raise FileNotFoundError(
            f"no {FILE_NAME} in the directory {path}; save one there with "
            "HeadProfile.save_pretrained, or name a repository on the Hub"
        )
    try:
        return Path(
            hf_hub_download(
                str(source),
                FILE_NAME,
                revision=revision,
                cache_dir=cache_dir,
                local_files_only=local_files_only,
                token=token,
            )
        )
    except HFValidationError as error:
        raise FileNotFoundError(
            f"{source} is neither a file, nor a directory, nor the id of a Hub repository"
        ) from error
    except RevisionNotFoundError as error:
        raise FileNotFoundError(f"{source} has no revision {revision!r} on the Hub") from error
    except LocalEntryNotFoundError as error:
        raise FileNotFoundError(
            f"the Hub can not be reached (or is switched off) and {FILE_NAME} of {source}, "
            f"revision {revision or 'main'!r}, is not in the local cache; load it once online"
        ) from error
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"the Hub repository {source} has no {FILE_NAME}; upload one with "
            "HeadProfile.push_to_hub, or make one with `flexicache profile collect`"
        ) from error
    except RepositoryNotFoundError as error:
        raise FileNotFoundError(
            f"{source} is neither a local path nor a Hub repository that you can read; "
            "check its name, and log in if it is private"
        ) from error


def look_up(model: Any, *, hub: bool) -> HeadProfile | None:
    """See `HeadProfile.for_model`."""
    config = None if isinstance(model, str | Path) else getattr(model, "config", model)
    name = str(model) if config is None else (getattr(config, "_name_or_path", "") or "")
    profile = _bundled(name) or _beside(name) or (_on_hub(name) if hub else None)
    if profile is not None and config is not None:
        profile.check(config)
    return profile


def push(
    profile: HeadProfile,
    repo_id: str,
    private: bool | None,
    revision: str | None,
    token: str | bool | None,
    message: str,
) -> str:
    """See `HeadProfile.push_to_hub`."""
    from .card import write_card

    api = HfApi(token=token)
    api.create_repo(repo_id, private=private, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        profile.save_pretrained(folder)
        write_card(profile, repo_id, Path(folder))
        commit = api.upload_folder(
            repo_id=repo_id, folder_path=folder, commit_message=message, revision=revision
        )
    return str(commit.commit_url)


def _bundled(name: str) -> HeadProfile | None:
    if not name:
        return None
    wanted = f"{name.replace('/', '--')}.json".lower()
    for entry in files("flexicache_hf").joinpath("profiles", "bundled").iterdir():
        if entry.name.lower() == wanted:
            with as_file(entry) as path:
                return HeadProfile.from_pretrained(path)
    return None


def _beside(name: str) -> HeadProfile | None:
    path = Path(name) / FILE_NAME
    return HeadProfile.from_pretrained(path) if name and path.is_file() else None


def _on_hub(name: str) -> HeadProfile | None:
    if not name or Path(name).exists() or name.count("/") > 1:
        return None
    places = [name]
    if namespace := os.environ.get(NAMESPACE_VARIABLE):
        places.append(f"{namespace}/{name.split('/')[-1]}-head-profile")
    for repo_id in places:
        try:
            cached = try_to_load_from_cache(repo_id, FILE_NAME)
        except HFValidationError:  # not a repository's name
            continue
        if cached is not None and not isinstance(cached, str):
            continue  # the Hub has said that this repository has none
        if cached is None and not _worth_asking(repo_id):
            continue
        try:
            return HeadProfile.from_pretrained(cached or repo_id)
        except FileNotFoundError:  # which leaves a note in the cache
            continue
    return None


def _worth_asking(repo_id: str) -> bool:
    """Whether the Hub answers and knows the repository; a download would retry for long."""
    try:
        get_hf_file_metadata(hf_hub_url(repo_id, FILE_NAME), timeout=LOOK_UP_SECONDS)
    except EntryNotFoundError:
        return True
    except Exception:  # unknown or closed repository, no connection: the transport's errors differ
        return False  # between versions of huggingface_hub
    return True
