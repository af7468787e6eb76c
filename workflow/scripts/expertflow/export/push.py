"""Push an expert to the hub: the merged model or the adapter, with its card."""

import logging
from fnmatch import fnmatch
from pathlib import Path

from expertflow.core.errors import ConfigError
from expertflow.core.records import read_part
from expertflow.core.sidecars import check_inputs, list_files
from expertflow.evaluate.records import Published
from expertflow.export.records import ADAPTER_CARD, CARD, export_command

log = logging.getLogger(__name__)
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
# Files of the merged model that are not pushed with an adapter.
MERGED_ONLY = ("config.json", "*.safetensors", "*.safetensors.index.json")


def push_expert(results: Path, repository: str, *, adapter: bool, public: bool) -> str:
    """Upload one commit and return its URL; raise ConfigError if that fails.

    The token is the client's own, from ``hf auth login`` or HF_TOKEN; it is never shown.
    """
    files = find_files(results, adapter=adapter)
    import httpx2
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi, get_token
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    logging.getLogger("httpx2").setLevel(logging.WARNING)
    if get_token() is None:
        raise ConfigError(
            f"{repository}: no token; run 'hf auth login', or set HF_TOKEN to one that can write"
        )
    # Only now, because hashing large weights takes minutes.
    records = ("training.json", "evaluation.json", "export.json") if adapter else ("export.json",)
    # A card may have been edited: it quotes the data.
    cards = [results / "merged" / name for name in (CARD, ADAPTER_CARD)]
    check_inputs([*(results / name for name in records), *files.values()], made=cards)
    what = "adapter" if adapter else "merged model"
    added = [CommitOperationAdd(name, path) for name, path in files.items()]
    api = HfApi()
    try:
        api.create_repo(repository, private=not public, exist_ok=True)
        old = sorted(filter(_is_weights, set(api.list_repo_files(repository)) - set(files)))
        if old:
            message = "removed from %s (its history keeps them), because they would be loaded: %s"
            log.info(message, repository, ", ".join(old))
        done = api.create_commit(
            repository,
            [*added, *map(CommitOperationDelete, old)],
            commit_message=f"Upload the {what} of {results.resolve().name}",
        )
    except HFValidationError as error:
        raise ConfigError(
            f"--repository {repository}: not the name of a hub repository; use owner/name"
        ) from error
    except HfHubHTTPError as error:
        raise ConfigError(
            f"{repository}: the hub refused it ({error.response.status_code}); log in with a token"
            " that can write there"
        ) from error
    except (httpx2.HTTPError, OSError) as error:
        raise ConfigError(
            f"{repository}: the hub cannot be reached ({type(error).__name__}); check the network"
            " and HF_ENDPOINT"
        ) from error
    return str(done.commit_url)


def _is_weights(name: str) -> bool:
    # An old model.safetensors takes precedence over new shards, an adapter over both.
    return "/" not in name and any(fnmatch(name, p) for p in (*MERGED_ONLY, *ADAPTER_FILES))


def find_files(results: Path, *, adapter: bool) -> dict[str, Path]:
    """Return the files to upload, by their name in the repository."""
    merged = results / "merged"
    export = export_command(results)
    if not (merged / CARD).is_file():
        raise ConfigError(f"{results}: no exported model here; make one with: {export}")
    found = {path.relative_to(merged).as_posix(): path for path in list_files(merged)}
    # Hidden folders, too: an editor may keep what was removed from a card.
    found = {n: path for n, path in found.items() if not n.startswith(".") and "/." not in n}
    if not adapter:
        return found
    published = read_part(Published, results / "evaluation.json", "published")
    folder, card = results / "checkpoint" / published.path, merged / ADAPTER_CARD
    if not (folder / ADAPTER_FILES[0]).is_file():
        raise ConfigError(f"{folder}: contains no adapter; omit --adapter")
    base, kind = (read_part(str, results / "model.json", key) for key in ("name", "kind"))
    # peft would look for a folder with this name on the user's machine.
    if kind != "hub":
        raise ConfigError(
            f"{folder}: its base {base} is on this machine only; omit --adapter to push the"
            " merged model"
        )
    if not card.is_file() or published.weights_sha256 not in card.read_text(encoding="utf-8"):
        raise ConfigError(f"{merged}: no card for the adapter in {folder}; export again: {export}")
    texts = {n: path for n, path in found.items() if not any(map(path.match, MERGED_ONLY))}
    return texts | {CARD: card} | {name: folder / name for name in ADAPTER_FILES}
