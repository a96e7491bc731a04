"""What a model keeps in Python's containers, generators and optimisers from one call to the next stays what it is."""

import copy
import random
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autokernel.integration.apply import apply, explain
from autokernel.integration.winner import Winner
from autokernel.model.capture import capture
from autokernel.target import Target

pytestmark = pytest.mark.usefixtures("nothing_compiled_before")

X = torch.randn(3, 4)
NONE = [Winner(Target("none", "matmul", "cpp", "cpu", ()), "")]


def window(model: "Keeps", x: Tensor) -> Any:
    model.kept.append(x.shape[0])
    return x + len(model.kept), [*model.kept]


def draws(model: "Keeps", x: Tensor) -> Any:
    drawn = model.kept.random()
    return (x * 2 if model.kept.random() < 0.5 else x) + drawn, drawn


def last_used(model: "Keeps", x: Tensor) -> Any:
    model.kept.move_to_end(next(iter(model.kept)))
    return x + 1, [*model.kept]


def first_used(model: "Keeps", x: Tensor) -> Any:
    model.kept.move_to_end("c", last=False)
    model.kept["b"] += 1
    return x + model.kept["b"], [*model.kept.items()]


def taken_out(model: "Keeps", x: Tensor) -> Any:
    others = model.kept.copy()
    others.popitem(last=False)
    return x + 1, [*others.items()]


def added(model: "Keeps", x: Tensor) -> Any:
    model.kept.add(x.shape[0])
    return x + len(model.kept), len(model.kept)


def added_in_place(model: "Keeps", x: Tensor) -> Any:
    kept = model.kept
    kept += [x.shape[0]]
    return x + len(model.kept), [*model.kept]


def joined_in_place(model: "Keeps", x: Tensor) -> Any:
    kept = type(model.kept)(a=1)
    kept |= {"b": x.shape[0]}
    return x + 1, (type(kept), [*kept.items()])


def made(model: "Keeps", x: Tensor) -> Any:
    model.kept = Seen([1, x.shape[0]])
    return x + 1, len(model.kept)


def made_once(model: "Keeps", x: Tensor) -> Any:
    if "made" not in model.__dict__:
        model.made = 0
    model.made += 1
    return x + model.made, model.made


def asked_by_name(model: "Keeps", x: Tensor) -> Any:
    calls = vars(model).get("calls", 0)
    model.calls = calls + 1
    return x + calls, calls


def numbered(model: "Keeps", x: Tensor) -> Any:
    setattr(model, f"number_{len(model.__dict__)}", 1)
    return x + 1, len([name for name in vars(model) if name.startswith("number_")])


class Recent(deque):
    pass


class Seen(set):
    pass


class Log(list):
    pass


class Fields(dict):
    pass


class Drawing(random.Random):
    pass


class Keeps(nn.Module):
    def __init__(self, step: Callable[..., Any], kept: Any):
        super().__init__()
        self.step, self.kept = step, kept

    def forward(self, x: Tensor) -> Any:
        return self.step(self, x.sin())


CASES = {
    "deque": (window, deque(maxlen=2)),
    "kind of deque": (window, Recent(maxlen=2)),
    "deque without end": (window, deque()),
    "generator": (draws, random.Random(3)),
    "kind of generator": (draws, Drawing(3)),
    "ordered dict": (last_used, OrderedDict(a=1, b=2, c=3)),
    "ordered dict, first": (first_used, OrderedDict(a=1, b=2, c=3)),
    "copy of an ordered dict": (taken_out, OrderedDict(a=1, b=2, c=3)),
    "attribute that is made once": (made_once, None),
    "attribute that is asked for by name": (asked_by_name, None),
    "attributes of new names": (numbered, None),
    "kind of set": (added, Seen([9])),
    "kind of set, new": (made, None),
    "kind of list": (added_in_place, Log([9])),
    "kind of dict": (joined_in_place, Fields(a=1)),
}


def shown(kept: Any) -> Any:
    return kept.getstate() if isinstance(kept, random.Random) else [*kept] if isinstance(kept, Iterable) else kept


@pytest.mark.parametrize("case", CASES)
def test_what_is_kept_in_pythons_own_objects(case: str) -> None:
    model = Keeps(*copy.deepcopy(CASES[case]))
    ours = apply(copy.deepcopy(model), NONE)
    for _ in range(4):
        expected, theirs = model(X)
        result, kept = ours(X)
        torch.testing.assert_close(result, expected)
        assert kept == theirs and shown(ours.kept) == shown(model.kept)


def test_what_a_module_has_is_asked_again_only_where_it_matters() -> None:
    ours = apply(Keeps(lambda model, x: x * vars(model).get("scale", 1), None), NONE)
    for scale in (1, 1, 2, 2):
        if scale > 1:
            ours.scale = scale
        torch.testing.assert_close(ours(X), X.sin() * scale)
        ours.other = torch.zeros(scale)
    assert explain(ours).graphs == 2


class Adapting(nn.Module):
    """Test-time training: a step of an optimiser in forward, whose graph holds the parameters that it writes to."""

    def __init__(self, kind: str):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 4)
        options = {"momentum": 0.9} if kind == "SGD" else {}
        self.optimizer = getattr(torch.optim, kind)(self.inner.parameters(), lr=0.1, **options)

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            self.optimizer.zero_grad()
            (self.inner(x) - x).pow(2).mean().backward()
            self.optimizer.step()
        return self.outer(self.inner(x).detach())


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", ["SGD", "AdamW"])
def test_steps_of_an_optimiser_are_taken_once(kind: str) -> None:
    """None more while a graph of them is traced."""
    torch.manual_seed(0)
    model = Adapting(kind)
    torch.manual_seed(0)
    ours = apply(Adapting(kind), NONE)
    for _ in range(3):
        torch.testing.assert_close(ours(X), model(X))
    torch.testing.assert_close(ours.state_dict(), model.state_dict())
    assert not any("left as it is: " in why for why in explain(ours).left)  # by an error


@pytest.mark.slow
def test_steps_of_an_optimiser_are_taken_once_where_a_model_is_captured() -> None:
    torch.manual_seed(0)
    model = Adapting("SGD")
    torch.manual_seed(0)
    ours = Adapting("SGD")
    for _ in range(3):
        model(X)
        capture(ours, (X,), {})
    torch.testing.assert_close(ours.state_dict(), model.state_dict())
