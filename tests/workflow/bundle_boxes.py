"""Two machines for a test: one prepares and one trains, each in its own folder."""

from pathlib import Path

from workflow_space import Workspace, copy_code

GPU_WORK = {
    "stage_to_nvme", "train_expert", "generate_answers", "evaluate_expert", "export_model",
    "build_report",
}  # fmt: skip
BUNDLE = "results/tiny/bundle.tar"


def make_bundle(cheap: Workspace) -> Path:
    cheap.run(BUNDLE)
    return cheap.root / BUNDLE


def make_box(root: Path, like: Workspace) -> Workspace:
    """Make a machine with only the code: no data, no manifest of this expert."""
    copy_code(like.root, root)
    (root / "config" / "experts" / "tiny.yaml").unlink()
    (root / "home").mkdir()
    return Box(root)


class Box(Workspace):
    def environment(self, changes: dict[str, str]) -> dict[str, str]:
        return super().environment({"HOME": str(self.root / "home"), **changes})

    def files(self) -> list[Path]:
        return [p for p in sorted(self.root.rglob("*")) if "__pycache__" not in p.parts]

    def open(self, bundle: Path, *arguments: object) -> None:
        done = self.script("open_bundle", bundle, *arguments)
        assert done.returncode == 0, done.stderr

    def outcome(self, expert: str = "tiny") -> Path:
        done = self.script("make_outcome", expert, "--output", "outcome.tar")
        assert done.returncode == 0, done.stderr
        return self.root / "outcome.tar"

    def refused_to_open(self, *arguments: object) -> str:
        """Return the one-line error of ``open_bundle``, which must leave nothing behind."""
        before = self.files()
        done = self.script("open_bundle", *arguments)
        assert done.returncode == 1, done.stderr
        assert self.files() == before
        last = done.stderr.splitlines()[-1]
        assert last.startswith("error: ")
        return last
