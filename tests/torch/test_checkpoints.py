"""A training goes on from a checkpoint as if it had never stopped, and no release is forgotten."""

from __future__ import annotations

import copy
import io
import pickle
import zipfile
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from torch import nn

from privagrad.torch import ExponentialGradClip, PrivacyEngine, StepNoise
from tests.torch.small import Run, private, table

OPTIONS = {"noise_multiplier": 1.0, "poisson_sampling": True, "batch_size": 8}


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def fresh(engine: PrivacyEngine | None = None, **options: Any) -> Run:
    return private(optimizer=adam, engine=engine, **(OPTIONS | options))


def save(run: Run, path: Path) -> None:
    run.engine.save_checkpoint(path=path, module=run.module, optimizer=run.optimizer)


def load(path: Path, engine: PrivacyEngine | None = None, **options: Any) -> Run:
    run = fresh(engine, **options)
    run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    return run


def steps(run: Run) -> int:
    return len(run.engine.accountant)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "checkpoint.pt"


@pytest.mark.parametrize("kind", ["given", "pagan"])
def test_everything_comes_back(path: Path, kind: str) -> None:
    torch.manual_seed(0)
    scales = [torch.rand(3, 5) + 0.5, torch.rand(3) + 0.5]
    run = fresh(ellipsoid=scales if kind == "given" else "pagan")
    for _ in range(3):  # beyond the step at which an ellipsoid has been learned
        run.epoch()
    run.engine.save_checkpoint(
        path=path, module=run.module, optimizer=run.optimizer, checkpoint_dict={"epoch": 3}
    )
    again = fresh()
    state = again.engine.load_checkpoint(path=path, module=again.module, optimizer=again.optimizer)
    assert state["epoch"] == 3
    for a, b in zip(run.optimizer.params, again.optimizer.params, strict=True):
        assert torch.equal(a, b)
        ours, theirs = run.optimizer.state[a], again.optimizer.state[b]
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert run.optimizer.scales.keys() == again.optimizer.scales.keys()
    for name, scale in run.optimizer.scales.items():
        assert torch.equal(scale.full, again.optimizer.scales[name].full)
        assert not torch.equal(scale.full, torch.ones_like(scale.full))
    assert again.engine.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5) > 0


def test_a_resumed_run_is_on_the_same_curve(path: Path) -> None:
    run, whole = fresh(), fresh()
    run.epoch()
    save(run, path)
    resumed = load(path)
    resumed.epoch()
    for _ in range(2):
        whole.epoch()
    assert resumed.engine.accountant.events == whole.engine.accountant.events
    assert resumed.engine.get_epsilon(1e-5) == whole.engine.get_epsilon(1e-5)


@pytest.mark.parametrize("engines", ["one", "two"])
def test_two_runs_from_one_checkpoint_are_both_paid(path: Path, engines: str) -> None:
    run = fresh()
    run.epoch()
    save(run, path)
    first = load(path)
    first.epoch()
    assert steps(first) == 16
    second = load(path, first.engine if engines == "one" else None)
    assert steps(second) == 16
    second.epoch()
    assert steps(second) == 24
    assert steps(load(path)) == 24


def test_what_a_run_releases_after_saving_is_paid_by_all(path: Path) -> None:
    run = fresh()
    run.epoch()
    save(run, path)
    run.epoch()
    assert steps(load(path)) == 16


def test_a_run_that_goes_on_in_memory_forgets_nothing(path: Path) -> None:
    run = fresh()
    run.epoch()
    save(run, path)
    run.epoch()
    run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    run.epoch()
    assert steps(run) == 24


def test_a_run_that_loads_its_own_file_is_seen_by_others(path: Path) -> None:
    run = fresh()
    run.epoch()
    save(run, path)
    run.engine.load_checkpoint(path=path, module=run.module, optimizer=run.optimizer)
    run.epoch()
    assert steps(run) == 16
    assert steps(load(path)) == 16


def test_copies_of_an_engine_count_beside_each_other(path: Path) -> None:
    """Under one name their notes of releases would count as those of one run."""
    save(fresh(), path)
    engine = PrivacyEngine()
    for one in (engine, copy.deepcopy(engine), pickle.loads(pickle.dumps(engine))):
        load(path, one).epoch()
    assert steps(load(path)) == 3 * steps_of_an_epoch()


def steps_of_an_epoch() -> int:
    run = fresh()
    run.epoch()
    return steps(run)


def test_a_file_that_is_written_over_counts_once(path: Path) -> None:
    """The usual loop: load, train, save to the same place."""
    run = fresh()
    for passes in range(1, 5):
        run.epoch()
        save(run, path)
        run = load(path)
        assert steps(run) == 8 * passes


def test_releases_without_noise_stay_infinite(path: Path) -> None:
    run = fresh(noise_multiplier=0.0)
    run.epoch()
    save(run, path)
    assert load(path).engine.get_epsilon(1e-5) == float("inf")


def test_seeds_stay_seeds(path: Path) -> None:
    run = fresh(random_state=3)
    run.epoch()
    save(run, path)
    assert load(path).engine.report(1e-5).seeded


def test_a_file_is_whole_or_not_there(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = fresh()
    run.epoch()
    save(run, path)
    before = path.read_bytes()
    run.epoch()

    def fail(state: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(torch, "save", fail)
    with pytest.raises(OSError, match="no space"):
        save(run, path)
    assert path.read_bytes() == before
    with pytest.raises(OSError, match="no space"):
        save(run, path.with_name("other.pt"))
    assert not path.with_name("other.pt").exists()


def test_other_files_are_refused(path: Path) -> None:
    run = fresh()
    with pytest.raises(FileNotFoundError, match="Expected a checkpoint"):
        load(path)
    torch.save({"module_state_dict": {}}, path)
    with pytest.raises(ValueError, match="Expected a checkpoint of save_checkpoint"):
        load(path)
    run.engine.save_checkpoint(path=path, module=run.module)
    with pytest.raises(ValueError, match="Expected an optimizer"):
        load(path)


def test_the_module_alone_may_be_loaded(path: Path) -> None:
    run = fresh()
    run.epoch()
    save(run, path)
    plain = nn.Linear(5, 3)
    plain.load_state_dict(run.module._module.state_dict())
    engine = PrivacyEngine()
    engine.load_checkpoint(path=path, module=private(plain).module)
    assert engine.get_epsilon(1e-5) == run.engine.get_epsilon(1e-5)


def test_schedules_go_on_from_the_file(path: Path) -> None:
    run = fresh()
    noise, bound = StepNoise(run.optimizer, step_size=1, gamma=0.5), ExponentialGradClip(
        run.optimizer, gamma=0.9
    )  # fmt: skip
    for _ in range(2):
        run.epoch()
        noise.step()
        bound.step()
    run.engine.save_checkpoint(
        path=path, module=run.module, optimizer=run.optimizer, noise_scheduler=noise,
        grad_clip_scheduler=bound,
    )  # fmt: skip
    again = fresh()
    resumed = StepNoise(again.optimizer, step_size=1, gamma=0.5)
    clipped = ExponentialGradClip(again.optimizer, gamma=0.9)
    again.engine.load_checkpoint(
        path=path, module=again.module, optimizer=again.optimizer, noise_scheduler=resumed,
        grad_clip_scheduler=clipped, torch_load_kwargs={"map_location": "cpu"},
    )  # fmt: skip
    assert again.optimizer.noise_multiplier == run.optimizer.noise_multiplier == 0.25
    assert again.optimizer.max_grad_norm == run.optimizer.max_grad_norm < 1


def test_a_schedule_that_was_not_saved_is_missed(path: Path) -> None:
    save(fresh(), path)
    again = fresh()
    schedule = StepNoise(again.optimizer, step_size=1, gamma=0.5)
    with pytest.raises(ValueError, match="Expected a noise_scheduler"):
        again.engine.load_checkpoint(path=path, module=again.module, noise_scheduler=schedule)
    assert steps(again) == 0


def test_a_file_in_memory_is_refused(path: Path) -> None:
    """What is released from it later could not be noted beside it."""
    run = fresh()
    with pytest.raises(TypeError, match="in a file beside it"):
        run.engine.save_checkpoint(path=io.BytesIO(), module=run.module)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="Expected the path"):
        run.engine.load_checkpoint(path=io.BytesIO(), module=run.module)  # type: ignore[arg-type]


def test_a_model_that_does_not_fit_is_charged_all_the_same(path: Path) -> None:
    """Its file has been read: what it cost is counted before anything is restored."""
    run = fresh()
    run.epoch()
    save(run, path)
    again = fresh(module=nn.Linear(7, 3), data=table(64, 7))
    with pytest.raises(RuntimeError, match="size mismatch"):
        again.engine.load_checkpoint(path=path, module=again.module, optimizer=again.optimizer)
    assert steps(again) == 8


def test_what_the_user_vouches_for_stays_so_after_a_checkpoint(tmp_path: Path) -> None:
    first = private(noise_multiplier=1.0, verify=False)
    first.epoch()
    path = tmp_path / "run.pt"
    first.engine.save_checkpoint(path=path, module=first.module, optimizer=first.optimizer)
    other = private(noise_multiplier=1.0)
    other.engine.load_checkpoint(path=path, module=other.module, optimizer=other.optimizer)
    assert not other.engine.report(1e-5).verified


class Evil:
    def __reduce__(self) -> Any:
        return pytest.fail, ("a pickle was loaded",)


@pytest.mark.parametrize("options", [{"weights_only": False}, {"pickle_module": pickle}])
def test_no_option_makes_reading_run_code(path: Path, options: dict[str, Any]) -> None:
    save(fresh(), path)
    again = fresh()
    with pytest.raises(ValueError, match="weights_only=True"):
        again.engine.load_checkpoint(path=path, module=again.module, torch_load_kwargs=options)


def test_a_checkpoint_of_a_stranger_runs_no_code(path: Path) -> None:
    run = fresh()
    torch.save({"privagrad": {"format": 1, "seeded": False}, "module_state_dict": Evil()}, path)
    for options in (None, {"weights_only": True}, {"map_location": "cpu"}):
        with pytest.raises(ValueError, match=r"Expected a checkpoint .* found: Weights only load"):
            run.engine.load_checkpoint(path=path, module=run.module, torch_load_kwargs=options)
    path.write_bytes(pickle.dumps(Evil()))
    with pytest.raises(ValueError, match="File is not a zip file"):
        run.engine.load_checkpoint(path=path, module=run.module)


def test_a_checkpoint_needs_no_more_memory_than_its_bytes(path: Path) -> None:
    """64 megabytes of zeros, packed into 64 kilobytes."""
    run = fresh()
    save(run, path)
    with (
        zipfile.ZipFile(path, "a", zipfile.ZIP_DEFLATED) as archive,
        archive.open("checkpoint/data/9", "w", force_zip64=True) as entry,
    ):
        for _ in range(64):
            entry.write(bytes(2**20))
    with pytest.raises(ValueError, match="larger than the file"):
        run.engine.load_checkpoint(path=path, module=run.module)


def resumed_twice(path: Path) -> Path:
    """A checkpoint, and what a run from it has released since; its journal."""
    run = fresh()
    save(run, path)
    load(path).epoch()
    return path.with_name(path.name + ".resumed")


@pytest.mark.parametrize("way", ["folder", "link"])
def test_releases_are_noted_beside_the_file_itself(
    path: Path, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever folder is entered after it was named, and whatever link led to it."""
    (elsewhere := path.parent / "elsewhere").mkdir()
    monkeypatch.chdir(path.parent)
    run = fresh()
    save(run, Path(path.name))
    named = Path(path.name)
    if way == "link":
        (named := elsewhere / "latest.pt").symlink_to(path)
    again = load(named)
    monkeypatch.chdir(elsewhere)
    again.epoch()
    assert steps(again) == 8
    assert steps(load(path)) == 8


def test_saving_over_a_link_keeps_it(path: Path) -> None:
    run = fresh()
    save(run, path)
    (link := path.with_name("latest.pt")).symlink_to(path)
    run.epoch()
    save(run, link)
    assert link.is_symlink()
    assert steps(load(path)) == 8


def test_a_record_that_was_cut_off_is_of_no_release(path: Path) -> None:
    journal = resumed_twice(path)
    whole = journal.read_bytes()
    last = len(whole.splitlines(keepends=True)[-1])
    for cut in range(1, last + 1):
        journal.write_bytes(whole[:-cut])
        # Without the line's end alone, the record is whole.
        assert steps(load(path)) == (8 if cut == 1 else 7)


def test_whoever_goes_on_after_a_cut_keeps_all_records(path: Path) -> None:
    journal = resumed_twice(path)
    journal.write_bytes(journal.read_bytes()[:-20])
    load(path).epoch()
    assert steps(load(path)) == 15


@pytest.mark.parametrize("damage", [b"\0" * 30 + b"\n", b'{"run": "a"}\n', b"[1]\n", b"\xff\n"])
def test_a_damaged_record_is_refused(path: Path, damage: bytes) -> None:
    """Of other damage nobody knows what it replaced."""
    journal = resumed_twice(path)
    journal.write_bytes(damage + journal.read_bytes())
    with pytest.raises(ValueError, match=r"line 1 of checkpoint\.pt\.resumed"):
        load(path)


def test_a_release_that_cannot_be_noted_is_not_made(path: Path) -> None:
    journal = resumed_twice(path)
    run = load(path)
    before = [p.detach().clone() for p in run.optimizer.params]
    journal.unlink()
    journal.mkdir()
    with pytest.raises(OSError, match="Expected to note a release"):
        run.epoch()
    assert all(torch.equal(a, b) for a, b in zip(before, run.optimizer.params, strict=True))
    assert steps(run) == 9
