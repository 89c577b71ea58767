"""Batches on their way from the data set to the loop: rows stay by themselves, or are refused."""

from __future__ import annotations

import random
import types
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import (
    ConcatDataset,
    DataLoader,
    Dataset,
    StackDataset,
    Subset,
    TensorDataset,
    default_collate,
    get_worker_info,
)

from privagrad.torch import BatchMemoryManager, PrivacyEngine
from privagrad.torch.guards.collation import refuse_mixing
from privagrad.torch.guards.determinism import random_state_kept
from privagrad.torch.guards.refusals import UnverifiedError
from privagrad.torch.guards.structure import map_tensors, tensors_of
from privagrad.torch.loaders import CollateAny, PrivateLoader, RowByRow, RowsOfTensors
from privagrad.torch.samplers import rows_of
from tests.torch.small import Run, sgd, table

Collate = Callable[[list[Any]], Any]


def of(collate: Collate | None = None, data: Dataset[Any] | None = None, **options: Any) -> Run:
    """A private training in the data loader's order and without noise."""
    module, engine = nn.Linear(5, 3), PrivacyEngine()
    workers = options.pop("loader", {})
    loader = DataLoader(data or table(), batch_size=16, collate_fn=collate, **workers)
    options = {"noise_multiplier": 0.0, "max_grad_norm": 1.0, "poisson_sampling": False} | options
    return Run(
        engine,
        *engine.make_private(
            module=module, optimizer=sgd(module.parameters()), data_loader=loader, **options
        ),
    )


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding."""


class Frozen(Mapping[str, Any]):
    """A mapping that cannot be written to."""

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Keyed(dict[str, Any]):
    """A dictionary with a name of its own."""


class Attributes:
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


class Slots:
    __slots__ = ("__hidden", "x", "y")

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y


@dataclass(frozen=True)
class Data:
    x: Tensor
    y: Tensor


class Named(NamedTuple):
    x: Tensor
    y: Tensor


class Pair(tuple[Any, ...]):
    """A tuple that is not a plain one."""


class Several(list[Any]):
    """A list that is not a plain one."""


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "user dict": lambda x, y: Encoding(x=x, y=y),
    "frozen mapping": lambda x, y: Frozen({"x": x, "y": y}),
    "mapping proxy": lambda x, y: types.MappingProxyType({"x": x, "y": y}),
    "dict subclass": lambda x, y: Keyed(x=x, y=y),
    "attributes": Attributes,
    "slots": Slots,
    "data class": Data,
    "named tuple": Named,
    "tuple subclass": lambda x, y: Pair((x, y)),
    "list subclass": lambda x, y: Several([x, y]),
    "namespace": lambda x, y: types.SimpleNamespace(inner=[Attributes(x, y)], name="a"),
}


def parts(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, Mapping):
        return batch["x"], batch["y"]
    if isinstance(batch, tuple | list):
        return batch[0], batch[1]
    batch = batch.inner[0] if isinstance(batch, types.SimpleNamespace) else batch
    return batch.x, batch.y


@pytest.fixture(params=CONTAINERS)
def container(request: pytest.FixtureRequest) -> Callable[[Tensor, Tensor], Any]:
    return CONTAINERS[request.param]


class TestContainers:
    def test_batches_in_any_container_are_trained_on(self, container: Any) -> None:
        run = of(lambda rows: container(*default_collate(rows)))
        twin = of()
        twin.module.load_state_dict(run.module.state_dict())
        twin.epoch()
        for batch in run.loader:
            assert type(batch) is type(container(torch.ones(1), torch.ones(1)))
            run.step(F.cross_entropy, *parts(batch))
        for found, expected in zip(run.gradients, twin.gradients, strict=True):
            assert torch.allclose(found, expected)

    def test_centring_by_the_batch_in_the_loop_is_refused(self, container: Any) -> None:
        run = of(lambda rows: container(*default_collate(rows)))
        x, y = parts(next(iter(run.loader)))
        with pytest.raises(UnverifiedError, match="keep examples apart"):
            run.step(F.cross_entropy, x - x.mean(0), y)

    def test_mixing_by_collate_is_refused(self, container: Any) -> None:
        def mixed(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            return container(0.5 * x + 0.5 * x.flip(0), y)

        with pytest.raises(ValueError, match="collate_fn"):
            next(iter(of(mixed).loader))

    def test_a_batch_that_is_used_again_is_charged_again(self, container: Any) -> None:
        run = of(lambda rows: container(*default_collate(rows)), noise_multiplier=1.0)
        first = None
        for batch in run.loader:
            first = first or batch
            run.step(F.cross_entropy, *parts(first))
        assert sum(event.count for event in run.engine.accountant.events) == 4

    def test_empty_batches_have_the_same_container(self, container: Any) -> None:
        collate = CollateAny(lambda rows: container(*default_collate(rows)), table())
        x, y = parts(collate([]).batch)
        assert x.shape == (0, 5)
        assert y.shape == (0,)

    @pytest.mark.parametrize("manager", [False, True])
    def test_batches_without_tensors_are_refused(self, manager: bool) -> None:
        def arrays(rows: list[Any]) -> Any:
            return {name: part.numpy() for name, part in zip("xy", default_collate(rows))}  # noqa: B905

        run = of(arrays)
        loader: Any = run.loader
        if manager:
            loader = BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=4, optimizer=run.optimizer
            ).parts
        with pytest.raises(UnverifiedError, match="Expected tensors in a batch"):
            next(iter(loader))
        trusted = of(arrays, verify=False)
        batch = next(iter(trusted.loader))
        trusted.step(F.cross_entropy, torch.tensor(batch["x"]), torch.tensor(batch["y"]))


class TestStructure:
    def test_cycles_end(self) -> None:
        child, parent = Attributes(torch.ones(1), torch.ones(2)), types.SimpleNamespace()
        parent.child, child.parent = child, parent  # type: ignore[attr-defined]
        assert [len(t) for t in tensors_of([parent, child])] == [1, 2]
        found = map_tensors(lambda t: 2 * t, parent)
        assert found is not parent
        assert found.child.parent is found
        assert found.child.x == 2
        assert child.x == 1

    def test_originals_stay_as_they_are(self, container: Any) -> None:
        original = container(torch.ones(2), torch.zeros(2))
        doubled = map_tensors(lambda t: t + 1, original)
        assert parts(original)[0].tolist() == [1, 1]
        assert parts(doubled)[0].tolist() == [2, 2]

    def test_what_holds_no_tensors_is_not_copied(self) -> None:
        class Uncopied:
            def __init__(self) -> None:
                self.values, self.text = [1, 2], "a"

            def __copy__(self) -> Any:
                raise AssertionError("copied")

        own = Uncopied()
        assert map_tensors(lambda t: t + 1, (torch.ones(1), own))[1] is own

    def test_modules_and_types_are_left_alone(self) -> None:
        module = nn.Linear(2, 2)
        holder = types.SimpleNamespace(module=module, kind=Data, make=Data.__init__, table=Encoding)
        assert tensors_of(holder) == []
        assert map_tensors(lambda t: t + 1, holder) is holder

    def test_order_is_that_of_the_walk(self) -> None:
        value = [torch.ones(1), Encoding(a=torch.ones(2), b=[Slots(torch.ones(3), torch.ones(4))])]
        seen: list[int] = []
        map_tensors(lambda t: seen.append(len(t)) or t, value)  # type: ignore[func-returns-value]
        assert seen == [len(t) for t in tensors_of(value)] == [1, 2, 3, 4]


def _uniform(kind: str) -> float:
    if kind == "python":
        return random.random()
    if kind == "numpy":
        return float(np.random.rand())  # noqa: NPY002
    return float(torch.rand(1))


class TestRandomCollate:
    @pytest.mark.parametrize("probability", [0.05, 0.5, 0.95])
    @pytest.mark.parametrize("rare", ["below", "above"])
    @pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
    def test_mixing_behind_a_branch_is_refused(
        self, kind: str, rare: str, probability: float
    ) -> None:
        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            drawn = _uniform(kind)
            if drawn < probability if rare == "below" else drawn > probability:
                x = 0.5 * x + 0.5 * x.flip(0)
            return x, y

        with pytest.raises(ValueError, match="collate_fn"):
            next(iter(of(collate).loader))

    BRANCHES: dict[str, Callable[[], Any]] = {  # noqa: RUF012
        "torch.randint": lambda: torch.randint(0, 4, (1,)) == 0,
        "torch.randint, last": lambda: torch.randint(4, (1,)).item() == 3,
        "torch.bernoulli": lambda: torch.bernoulli(torch.tensor(0.3)) == 1,
        "torch.randn": lambda: torch.randn(1) < -1,
        "uniform_": lambda: torch.empty(1).uniform_(-1, 1) < -0.5,
        "random.randint": lambda: random.randint(0, 3) == 0,
        "random.choice": lambda: random.choice([True, False, False]),
        "np.random.randint": lambda: np.random.randint(4) == 0,  # noqa: NPY002
    }

    @pytest.mark.parametrize("name", BRANCHES)
    def test_other_branches_are_seen(self, name: str) -> None:
        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            return (x - x.mean(0) if self.BRANCHES[name]() else x), y

        with pytest.raises(ValueError, match="collate_fn"):
            refuse_mixing(collate, [table()[i] for i in range(16)])

    def test_mixup_with_a_random_weight_is_refused(self) -> None:
        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            part = np.random.beta(0.4, 0.4)  # noqa: NPY002
            return part * x + (1 - part) * x[torch.randperm(len(x))], y

        with pytest.raises(ValueError, match="collate_fn"):
            next(iter(of(collate).loader))

    AUGMENTED: dict[str, Callable[[Tensor], Tensor]] = {  # noqa: RUF012
        "python flip": lambda x: x.flip(0) if random.random() < 0.5 else x,
        "python noise": lambda x: x + torch.tensor([random.gauss(0, 1) for _ in x]),
        "python rejections": lambda x: x * random.normalvariate(1, 0.1) * random.betavariate(2, 3),
        "python shuffle": lambda x: x[random.sample(range(5), 5)],
        "numpy flip": lambda x: x.flip(0) if np.random.rand() < 0.3 else x,  # noqa: NPY002
        "numpy noise": lambda x: x + torch.tensor(np.random.normal(size=5)).float(),  # noqa: NPY002
        "numpy much": lambda x: x + float(np.random.rand(1000).mean()),  # noqa: NPY002
        "numpy order": lambda x: x[np.random.permutation(5)],  # noqa: NPY002
        "numpy crop": lambda x: x.roll(int(np.random.randint(5))),  # noqa: NPY002
        "torch noise": lambda x: x + torch.randn_like(x),
        "torch flip": lambda x: x.flip(0) if torch.rand(1) < 0.5 else x,
        "torch order": lambda x: x[torch.randperm(5)],
        "torch dropout": lambda x: F.dropout(x, 0.5),
    }

    @pytest.mark.parametrize("name", AUGMENTED)
    def test_rows_changed_at_random_one_by_one_are_accepted(self, name: str) -> None:
        def collate(rows: list[Any]) -> Any:
            return default_collate([(self.AUGMENTED[name](x), y) for x, y in rows])

        of(collate).epoch()

    OWN: dict[str, Callable[[], Any]] = {  # noqa: RUF012
        "numpy": lambda: np.random.default_rng(3).normal,
        "numpy, old": lambda: np.random.RandomState(3).normal,
        "python": lambda: random.Random(3).random,
        "torch": lambda: partial(torch.rand, (), generator=torch.Generator().manual_seed(3)),
    }

    @pytest.mark.parametrize("name", OWN)
    def test_generators_of_ones_own(self, name: str) -> None:
        """Rows changed one by one are accepted, and the checks leave no trace in the numbers."""

        class Noisy:
            def __init__(self) -> None:
                self.draw = TestRandomCollate.OWN[name]()

            def __call__(self, rows: list[Any]) -> Any:
                return default_collate([(x + float(self.draw()), y) for x, y in rows])

        found = [x.as_subclass(Tensor) for x, _ in of(Noisy()).loader]
        expected = [x for x, _ in of(Noisy(), verify=False).loader]
        assert all(map(torch.equal, found, expected))

        def mixed(rows: list[Any], draw: Any = TestRandomCollate.OWN[name]()) -> Any:  # noqa: B008
            x, y = default_collate(rows)
            return x + x.roll(1, 0) * float(draw()), y

        with pytest.raises(ValueError, match="collate_fn"):
            next(iter(of(mixed).loader))

    def test_sizes_of_batches_are_seen_beside_random_rows(self) -> None:
        def collate(rows: list[Any]) -> Any:
            x, _ = default_collate(rows)
            noise = np.random.normal(size=(2, *x.shape)).sum(0)  # noqa: NPY002
            return x + torch.tensor(noise).float(), torch.full((len(x),), 1 / len(x))

        with pytest.raises(ValueError, match="collate_fn"):
            next(iter(of(collate).loader))

    def test_rows_changed_at_random_together_are_accepted(self) -> None:
        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            noise = torch.tensor(np.random.normal(size=(2, *x.shape))).float()  # noqa: NPY002
            scale = torch.tensor([random.gauss(1, 0.1) for _ in rows])
            return x * noise[0] + torch.rand(len(x), 1) + scale[:, None] * noise[1], y

        of(collate).epoch()

    def test_random_numbers_go_on_as_before(self) -> None:
        rows = [table()[i] for i in range(8)]

        def collate(rows: list[Any]) -> Any:
            return default_collate(
                [(x + _uniform("python") + _uniform("numpy"), y) for x, y in rows]
            )

        def drawn() -> list[float]:
            return [_uniform(kind) for kind in ("python", "numpy", "torch")]

        with random_state_kept():
            expected = drawn()
        refuse_mixing(collate, rows)
        assert drawn() == expected


def test_more_tensors_for_several_rows_are_refused() -> None:
    def collate(rows: list[Any]) -> Any:
        x, y = default_collate(rows)
        return (x, y, x.mean(0)) if len(rows) > 1 else (x, y)

    with pytest.raises(ValueError, match="collate_fn"):
        next(iter(of(collate).loader))


def test_tensors_without_rows_are_refused_in_a_loss() -> None:
    run = of(lambda rows: [*default_collate(rows), torch.tensor([2.0, 3.0, 4.0])])
    x, y, scale = next(iter(run.loader))
    with pytest.raises(UnverifiedError, match="one row for each of 16 examples"):
        F.cross_entropy(run.module(x) * scale, y).backward()


class TestColumns:
    def test_a_large_column_does_not_hide_the_others(self) -> None:
        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            return torch.cat([1e6 + 1e5 * x[:, :1], x[:, 1:] - x[:, 1:].mean(0)], 1), y

        with pytest.raises(ValueError, match="collate_fn"):
            next(iter(of(collate).loader))

    def test_large_columns_are_accepted(self) -> None:
        def collate(rows: list[Any]) -> Any:
            x, y = default_collate(rows)
            x = torch.cat([1e6 + 1e5 * x[:, :1], x[:, 1:]], 1)
            return x / x.norm(dim=1, keepdim=True), y

        of(collate).epoch()


class TestRepeats:
    DATA = table()

    REPEATED: dict[str, Any] = {  # noqa: RUF012
        "oversampling": ConcatDataset([DATA, Subset(DATA, [0, 1, 2])]),
        "the same tensors": ConcatDataset([DATA, TensorDataset(*DATA.tensors)]),
        "overlapping subsets": ConcatDataset(
            [Subset(DATA, range(40)), Subset(DATA, range(39, 64))]
        ),
        "counted from the end": Subset(DATA, [0, -64]),
        "subset of a nest": Subset(ConcatDataset([DATA, DATA]), [0, 64]),
        "deep": ConcatDataset([ConcatDataset([DATA]), Subset(ConcatDataset([DATA]), [63])]),
        "as a tensor": Subset(DATA, torch.tensor([3, 4, 3])),  # type: ignore[arg-type]
    }

    DIFFERENT: dict[str, Any] = {  # noqa: RUF012
        "parts": ConcatDataset([Subset(DATA, range(40)), Subset(DATA, range(40, 64))]),
        "halves of a nest": Subset(ConcatDataset([DATA, DATA]), [0, 65]),
        "other targets": ConcatDataset([DATA, TensorDataset(DATA.tensors[0], DATA.tensors[1] + 1)]),
        "stacked": StackDataset(DATA, DATA),
        "as a tensor": Subset(DATA, torch.tensor([3, 4, 5])),  # type: ignore[arg-type]
        "nothing": Subset(DATA, []),
    }

    @pytest.mark.parametrize("name", REPEATED)
    def test_repeated_rows_are_refused(self, name: str) -> None:
        with pytest.raises(ValueError, match="each row once"):
            rows_of(DataLoader(self.REPEATED[name], batch_size=2))

    @pytest.mark.parametrize("name", DIFFERENT)
    def test_different_rows_are_accepted(self, name: str) -> None:
        data = self.DIFFERENT[name]
        assert rows_of(DataLoader(data, batch_size=2)) == len(data)

    def test_a_row_that_a_sampler_repeats_is_once_in_a_batch(self) -> None:
        x, _ = next(iter(of(loader={"sampler": [3, 0, 3, torch.tensor(3), 1]}).loader))
        assert torch.equal(x.as_subclass(Tensor), self.DATA.tensors[0][[3, 0, 1]])

    def test_a_million_rows(self) -> None:
        data = TensorDataset(torch.zeros(1_000_000))
        twice: Dataset[Any] = ConcatDataset([data, Subset(data, [999_999])])
        with pytest.raises(ValueError, match="each row once"):
            rows_of(DataLoader(twice, batch_size=2))


class Centred(Dataset[Any]):
    """Rows one by one; many at once are centred by their mean."""

    def __init__(self) -> None:
        self.x, self.y = table().tensors
        self.opened = False

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> Any:
        return self.x[row], self.y[row]

    def __getitems__(self, rows: list[int]) -> Any:
        x = self.x[rows]
        return [(own, self.y[row]) for own, row in zip(x - x.mean(0), rows, strict=True)]


class OnlyMany(Dataset[Any]):
    """Rows only many at once."""

    def __len__(self) -> int:
        return 64

    def __getitems__(self, rows: list[int]) -> Any:
        return [table()[row] for row in rows]


class OnlyBatches(OnlyMany):
    """Whole batches, which cannot be taken apart."""

    def __getitems__(self, rows: list[int]) -> Any:
        return default_collate([table()[row] for row in rows])


def _open(worker: int) -> None:
    info = get_worker_info()
    assert info is not None
    assert isinstance(info.dataset, Centred)
    info.dataset.opened = True


def _if_open(rows: list[Any]) -> Any:
    info = get_worker_info()
    assert info is not None
    assert info.dataset.opened  # type: ignore[attr-defined]
    return default_collate(rows)


class TestRowByRow:
    @pytest.mark.parametrize("data", [Centred(), Subset(Centred(), range(64)), OnlyMany()])
    def test_rows_are_fetched_one_at_a_time(self, data: Dataset[Any]) -> None:
        run = of(data=data)
        assert run.loader.dataset is data
        found = torch.cat([x.as_subclass(Tensor) for x, _ in run.loader])
        assert torch.equal(found, table().tensors[0])

    def test_rows_of_plain_tensors_are_those_of_the_data_set(self) -> None:
        x, y = table().tensors
        data = TensorDataset(x, x.reshape(-1, 1, 5).transpose(1, 2), y)
        run = of(data=data)
        assert isinstance(run.loader, PrivateLoader)
        rows = run.loader._fetching.dataset
        assert isinstance(rows, RowsOfTensors)
        for chosen in ([3, 0, 3, -1], [], [torch.tensor(2), 5], [7]):
            collate: Any = run.loader._fetching.collate_fn
            together = collate(rows.__getitems__(chosen))
            expected = CollateAny(default_collate, data)([data[row] for row in chosen])
            assert type(together.batch) is type(expected.batch)
            for found, own in zip(together.batch, expected.batch, strict=True):
                assert torch.equal(found, own)
                assert found.dtype == own.dtype
                assert found.stride() == own.stride()
            assert together.unpadded == expected.unpadded == {}

    def test_only_plain_tensors_are_fetched_together(self) -> None:
        class Own(TensorDataset):
            pass

        fetched = {
            "plain": of(data=table()),
            "of its own kind": of(data=Own(*table().tensors)),
            "collated otherwise": of(lambda rows: default_collate(rows), data=table()),
        }
        kinds = {}
        for name, run in fetched.items():
            assert isinstance(run.loader, PrivateLoader)
            kinds[name] = type(run.loader._fetching.dataset)
        assert kinds == {
            "plain": RowsOfTensors, "of its own kind": RowByRow, "collated otherwise": RowByRow
        }  # fmt: skip

    def test_empty_batches_of_rows_that_come_many_at_once(self) -> None:
        run = of(data=OnlyMany(), poisson_sampling=True, noise_multiplier=1.0)
        assert run.loader.collate_fn([]).batch[0].shape == (0, 5)

    def test_data_sets_of_whole_batches_are_refused(self) -> None:
        with pytest.raises(TypeError, match="__getitem__"):
            next(iter(of(data=OnlyBatches()).loader))

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("start", ["fork", "spawn"])
    def test_workers_have_the_data_set_itself(self, start: str) -> None:
        data = Centred()
        options = {"num_workers": 2, "worker_init_fn": _open, "multiprocessing_context": start}
        run = of(_if_open, data, loader=options)
        for (x, y), (expected, _) in zip(run.loader, DataLoader(table(), 16), strict=True):
            assert torch.equal(x.as_subclass(Tensor), expected)
            run.step(F.cross_entropy, x, y)
        assert run.loader.dataset is data
        assert run.loader.worker_init_fn is _open


class Sentences(Dataset[Any]):
    """Rows of different lengths: row i has 2 + i % 7 numbers, and is the shortest at 0 and 7."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, row: int) -> Any:
        generator = torch.Generator().manual_seed(row)
        return torch.randn(2 + row % 7, generator=generator), row % 3


def padded(rows: list[Any]) -> Any:
    return pad_sequence([x for x, _ in rows], batch_first=True), torch.tensor([y for _, y in rows])


def noisy(rows: list[Any]) -> Any:
    return padded([(x + torch.tensor(np.random.normal(size=len(x))).float(), y) for x, y in rows])  # noqa: NPY002


def cropped(rows: list[Any]) -> Any:
    return padded([(x[: random.randint(1, len(x))], y) for x, y in rows])


class TestPadding:
    ROWS = [Sentences()[i] for i in range(1, 15)]  # noqa: RUF012

    def test_rows_alone_are_handed_on(self) -> None:
        """Among them the shortest, the only one at place 6."""
        alone = refuse_mixing(padded, self.ROWS)
        assert len(alone) == 2
        assert 6 in alone
        for place, (x, y) in alone.items():
            assert torch.equal(x, self.ROWS[place][0][None])
            assert torch.equal(y, torch.tensor([self.ROWS[place][1]]))

    def test_rows_of_one_length_are_not(self) -> None:
        assert refuse_mixing(padded, [Sentences()[3], Sentences()[10]]) == {}

    def test_random_numbers_are_those_of_the_batch(self) -> None:
        (x, _), alone = CollateAny(noisy, Sentences())(self.ROWS)
        assert 6 in alone
        for place, (own, _) in alone.items():
            length = len(self.ROWS[place][0])
            assert torch.equal(own, x[place : place + 1, :length])

    def test_random_lengths_are_not_known(self) -> None:
        for _ in range(5):
            _, alone = CollateAny(cropped, Sentences())(self.ROWS)
            assert all(len(self.ROWS[place][0]) == 2 for place in alone)

    def test_only_verified_batches_are(self) -> None:
        collate = CollateAny(padded, Sentences())
        verified = [bool(collate(self.ROWS).unpadded) for _ in range(9)]
        assert verified == [True, True, False, True, False, False, False, True, False]
        assert CollateAny(padded, Sentences(), verify=False)(self.ROWS).unpadded == {}

    def test_the_first_batch_of_different_lengths_is_verified(self) -> None:
        collate, even = CollateAny(padded, Sentences()), [Sentences()[3], Sentences()[10]]
        verified = [
            bool(collate(rows).unpadded) for rows in (even, even, self.ROWS, even, self.ROWS)
        ]
        assert verified == [False, False, True, False, False]

    @pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
    @pytest.mark.parametrize("workers", [0, 2])
    def test_they_are_announced(self, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
        told: list[Any] = []
        module = nn.Sequential(nn.Embedding(4, 3), nn.Flatten(0), nn.Linear(3, 3))
        _, _, loader = PrivacyEngine().make_private(
            module=module, optimizer=sgd(module.parameters()),
            data_loader=DataLoader(Sentences(), 14, collate_fn=padded, num_workers=workers),
            noise_multiplier=0.0, max_grad_norm=1.0, poisson_sampling=False,
        )  # fmt: skip
        assert isinstance(loader, PrivateLoader)
        monkeypatch.setattr(loader.charges, "_announce", lambda *given: told.append(given))
        list(loader)
        assert [len(alone) for _, _, alone in told] == [2, 2, 2 if workers else 0]

    def test_changed_by_the_batch_within_their_length_is_refused(self) -> None:
        def centred(rows: list[Any]) -> Any:
            x, y = padded(rows)
            return x - x.mean(0), y

        with pytest.raises(ValueError, match="collate_fn"):
            refuse_mixing(centred, self.ROWS)
