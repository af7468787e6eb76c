"""Push an expert to the hub: the merged model or the adapter, with its card."""

import logging
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.records import read_part
from expertflow.core.sidecars import check_inputs, list_files
from expertflow.evaluate.records import Published
from expertflow.export.records import ADAPTER_CARD, CARD, export_command

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Of the merged model, what an adapter leaves out.
MERGED_ONLY = ("config.json", "*.safetensors", "*.safetensors.index.json")


def push_expert(results: Path, repository: str, *, adapter: bool, public: bool) -> str:
    """Upload one commit and return its address; raise ConfigError if that cannot be done.

    The token is the client's own, of ``hf auth login`` or HF_TOKEN; nothing here shows it.
    """
    files = find_files(results, adapter=adapter)
    import httpx2
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if get_token() is None:
        raise ConfigError(
            f"{repository}: no token; run 'hf auth login', or set HF_TOKEN to one that may write"
        )
    # Only now, as hashing large weights takes minutes.
    records = ("training.json", "evaluation.json", "export.json") if adapter else ("export.json",)
    check_inputs([*(results / name for name in records), *files.values()])
    what = "adapter" if adapter else "merged model"
    operations = [CommitOperationAdd(name, path) for name, path in files.items()]
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        done = api.create_commit(
            repository, operations, commit_message=f"Upload the {what} of {results.resolve().name}"
        )
    except HFValidationError as error:
        raise ConfigError(
            f"--repository {repository}: not the name of a hub repository; use owner/name"
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code if error.response is not None else "no status"
        raise ConfigError(
            f"{repository}: the hub refuses it ({status}); log in with a token that may write there"
        ) from error
    except (httpx2.HTTPError, OSError) as error:
        raise ConfigError(
            f"{repository}: the hub cannot be reached ({type(error).__name__}); check the network"
            " and HF_ENDPOINT"
        ) from error
    return str(done.commit_url)


def find_files(results: Path, *, adapter: bool) -> dict[str, Path]:
    """Return what is uploaded, by its name in the repository."""
    merged = results / "merged"
    export = export_command(results)
    if not (merged / CARD).is_file():
        raise ConfigError(f"{results}: no exported model here; make one with: {export}")
    paths = [path for path in list_files(merged) if not path.name.startswith(".")]
    if not adapter:
        return {path.relative_to(merged).as_posix(): path for path in paths}
    published = read_part(Published, results / "evaluation.json", "published")
    folder, card = results / "checkpoint" / published.path, merged / ADAPTER_CARD
    if not (folder / ADAPTER_FILES[0]).is_file():
        raise ConfigError(f"{folder}: holds no adapter; leave --adapter out")
    base, kind = (read_part(str, results / "model.json", key) for key in ("name", "kind"))
    # peft would look for a folder of this name on the reader's machine.
    if kind != "hub":
        raise ConfigError(
            f"{folder}: its base {base} is on this machine only; leave --adapter out, and the"
            " merged model is pushed"
        )
    if not card.is_file() or published.weights_sha256 not in card.read_text(encoding="utf-8"):
        raise ConfigError(f"{merged}: no card of the adapter in {folder}; export again: {export}")
    texts = (path for path in paths if not any(map(path.match, MERGED_ONLY)))
    found = {path.relative_to(merged).as_posix(): path for path in texts}
    return found | {CARD: card} | {name: folder / name for name in ADAPTER_FILES}
