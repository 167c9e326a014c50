"""Sharing profiles: the real huggingface_hub client against a real server on 127.0.0.1."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer, Repository
from transformers import LlamaConfig

from flexicache_hf import FlexiCacheDynamicCache
from flexicache_hf.profiles.profile import FILE_NAME, HeadProfile

REPO = "someone/small-head-profile"


def profile(**changes):
    values = {
        "num_layers": 2,
        "num_kv_heads": 3,
        "unstable_heads": ((0, 1), (1, 2)),
        "model_id": "someone/small",
        "model_type": "llama",
        "head_dim": 8,
        "tasks": ("a", "b"),
        "top_k_pages": 4,
        "page_size": 16,
        "window": 16,
        "num_windows": 5,
        "stability": ((0.9, 0.1, 0.8), (0.7, 0.6, 0.2)),
        "votes": ((0, 5, 0), (0, 1, 4)),
        "task_heads": {"a": ((0, 1), (1, 2)), "b": ((0, 1), (1, 1))},
    }
    return HeadProfile(**{**values, **changes})


def config(**changes):
    sizes = {"hidden_size": 24, "num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 8}
    result = LlamaConfig(num_hidden_layers=2, **sizes)
    result._name_or_path = changes.pop("name", "someone/small")
    for key, value in changes.items():
        setattr(result, key, value)
    return result


WORKER = """
import contextlib, io, json, os, sys
from flexicache_hf import HeadProfile
for line in sys.stdin:
    request, out = json.loads(line), io.StringIO()
    os.environ.update(request["environment"])
    try:
        with contextlib.redirect_stdout(out):
            exec(request["code"], {"HeadProfile": HeadProfile})
        answer = {"out": out.getvalue().strip()}
    except Exception as error:
        answer = {"error": f"{type(error).__name__}: {error}"}
    for name in request["environment"]:
        del os.environ[name]
    print(json.dumps(answer), flush=True)
"""


class Client:
    """A process that knows one Hub only: huggingface_hub reads its settings when it is imported."""

    def __init__(self, **environment):
        others = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
        fixed = {"OMP_NUM_THREADS": "1", "NO_PROXY": "127.0.0.1", "HF_HUB_DISABLE_XET": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            env={**others, **fixed, **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def __call__(self, code, *, ok=True, **environment):
        """What `code` prints or, where it is not `ok`, its error."""
        self._process.stdin.write(json.dumps({"code": code, "environment": environment}) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        assert ("out" in answer) is ok, answer
        return answer["out" if ok else "error"]

    def close(self):
        self._process.stdin.close()
        self._process.wait(timeout=60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def hub():
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def clients(hub, tmp_path_factory):
    """Clients that share a cache: one online, one told to be offline, one whose Hub is gone."""
    home = str(tmp_path_factory.mktemp("hf"))
    made = {
        "online": Client(HF_ENDPOINT=hub.url, HF_HOME=home),
        "offline": Client(HF_ENDPOINT=hub.url, HF_HOME=home, HF_HUB_OFFLINE="1"),
        "cut off": Client(HF_ENDPOINT="http://127.0.0.1:9", HF_HOME=home),
    }
    yield made
    for each in made.values():
        each.close()


@pytest.fixture
def client(clients):
    return clients["online"]


def test_push_then_load_by_revision_then_offline(hub, clients, tmp_path):
    pytest.importorskip("matplotlib")
    client, offline = clients["online"], clients["offline"]
    path = profile().save_pretrained(tmp_path / "local")
    push = f"print(HeadProfile.from_pretrained({str(path)!r}).push_to_hub({REPO!r}, private=True))"
    first = client(push, HF_TOKEN=hub.token)
    stored = hub.repositories[REPO]
    assert stored.private
    sha = stored.refs["main"]
    assert first == f"{hub.url}/{REPO}/commit/{sha}"
    files = stored.commits[sha]
    assert json.loads(files[FILE_NAME]) == json.loads(path.read_text())
    assert files["stability.png"].startswith(b"\x89PNG")
    assert files["overlap.png"].startswith(b"\x89PNG")
    card = files["README.md"].decode()
    assert card.startswith("---\n")
    assert "base_model: someone/small" in card
    assert "| 1 | 2 |" in card  # layer 1: KV head 2
    assert "| a |  | 0.50 |" in card
    assert "stability.png" in card

    # A second version; the first stays reachable by its commit.
    changed = profile(unstable_heads=((0, 0), (1, 2)))
    changed.save_pretrained(tmp_path / "local")
    client(push, HF_TOKEN=hub.token)
    show = "print(HeadProfile.from_pretrained({!r}, revision={!r}).unstable_heads)"
    assert client(show.format(REPO, None), HF_TOKEN=hub.token) == "((0, 0), (1, 2))"
    assert client(show.format(REPO, sha), HF_TOKEN=hub.token) == "((0, 1), (1, 2))"

    # Offline: both come from the cache, and the server is not asked.
    asked = len(hub.requests)
    assert offline(show.format(REPO, None)) == "((0, 0), (1, 2))"
    assert offline(show.format(REPO, sha)) == "((0, 1), (1, 2))"
    assert len(hub.requests) == asked


@pytest.mark.parametrize(
    ("repo", "revision", "kind", "message"),
    [
        ("someone/absent", None, "online", "neither a local path nor a Hub repository"),
        ("someone/plain", None, "online", f"someone/plain has no {FILE_NAME}; upload one"),
        ("someone/plain", "v9", "online", "no revision 'v9'"),
        ("someone/plain", None, "offline", "not in the local cache; load it once"),
        ("not a name", None, "online", "neither a file, nor a directory, nor the id"),
        ("someone/hidden", None, "online", "log in if it is private"),
        ("someone/broken", None, "online", "profile.num_layers is 0, expected a whole number"),
        ("someone/newer", None, "online", "profile.schema is 99, expected 1 to 2; a newer schema"),
    ],
)
def test_every_failure_says_what_to_do(hub, clients, repo, revision, kind, message):
    hub.repositories["someone/plain"] = Repository()
    hub.repositories["someone/plain"].commit({"README.md": b"nothing"})
    hub.repositories["someone/hidden"] = Repository(private=True)
    broken = {"schema": 2, "num_layers": 0, "num_kv_heads": 1, "unstable_heads": []}
    for name, document in (("broken", broken), ("newer", {**broken, "schema": 99})):
        hub.repositories[f"someone/{name}"] = Repository()
        hub.repositories[f"someone/{name}"].commit({FILE_NAME: json.dumps(document).encode()})
    code = f"HeadProfile.from_pretrained({repo!r}, revision={revision!r})"
    assert message in clients[kind](code, ok=False)


def test_for_model_asks_the_models_repository_then_the_convention_and_remembers(hub, client):
    find = "found = HeadProfile.for_model('someone/small'); print(found and found.unstable_heads)"
    hub.repositories["someone/small"] = Repository()
    hub.repositories["someone/small"].commit({"config.json": b"{}"})
    assert client(find) == "None"
    asked = len(hub.requests)
    assert client(find) == "None"
    assert len(hub.requests) == asked  # the Hub's "there is none" was kept

    hub.repositories["lab/small-head-profile"] = Repository()
    text = profile().to_json().encode()
    hub.repositories["lab/small-head-profile"].commit({FILE_NAME: text})
    variable = {"FLEXICACHE_PROFILE_NAMESPACE": "lab"}
    assert client(find, **variable) == "((0, 1), (1, 2))"
    assert client(find.replace("small')", "small', hub=False)")) == "None"

    owned = profile(unstable_heads=((1, 0),), task_heads={}).to_json().encode()
    hub.repositories["someone/other"] = Repository()
    hub.repositories["someone/other"].commit({FILE_NAME: owned})
    assert client(find.replace("someone/small", "someone/other"), **variable) == "((1, 0),)"


@pytest.mark.parametrize("kind", ["offline", "cut off"])
def test_for_model_without_a_connection_finds_none(hub, clients, kind):
    asked = len(hub.requests)
    assert clients[kind]("print(HeadProfile.for_model('someone/unseen'))") == "None"
    assert len(hub.requests) == asked


def test_for_model_beside_a_local_model(tmp_path):
    profile().save_pretrained(tmp_path)
    expected = ((0, 1), (1, 2))
    assert HeadProfile.for_model(str(tmp_path)).unstable_heads == expected
    assert HeadProfile.for_model(Path(tmp_path)).unstable_heads == expected
    assert HeadProfile.for_model(config(name=str(tmp_path))).unstable_heads == expected
    with pytest.raises(ValueError, match="num_layers is 2, but the model has 5"):
        HeadProfile.for_model(config(name=str(tmp_path), num_hidden_layers=5))
    assert HeadProfile.for_model(config(name="")) is None


def test_a_directory_without_a_profile(tmp_path):
    with pytest.raises(FileNotFoundError, match=f"no {FILE_NAME} in the directory"):
        HeadProfile.from_pretrained(tmp_path)


def smollm2_config():
    config = LlamaConfig(
        num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3, hidden_size=576
    )
    config._name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
    return config


def test_the_bundled_profile_is_found_by_id_and_by_config():
    found = HeadProfile.for_model("HuggingFaceTB/SmolLM2-135M-Instruct", hub=False)
    assert HeadProfile.for_model(smollm2_config(), hub=False) == found
    assert HeadProfile.for_model("huggingfacetb/smollm2-135m-instruct", hub=False) == found
    assert len(found.unstable_heads) == round(0.25 * 90)
    assert found.with_unstable_fraction(0.25).unstable_heads == found.unstable_heads
    assert len(found.task_heads) >= 6
    assert HeadProfile.for_model("HuggingFaceTB/SmolLM2-360M-Instruct", hub=False) is None
    other = smollm2_config()
    other.num_key_value_heads = 9
    with pytest.raises(ValueError, match="num_kv_heads is 3, but the model has 9"):
        HeadProfile.for_model(other, hub=False)


@pytest.mark.model
def test_the_bundled_profile_fits_the_embedded_model(smollm2):
    model, _ = smollm2
    profile = HeadProfile.for_model(model)
    assert profile.model_id == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert FlexiCacheDynamicCache(model, profile).profile == profile
