"""A call's arguments, taken apart and put together."""

import collections
from typing import NamedTuple

import torch

from lightning_ckpt.arguments import Arguments


class Pair(NamedTuple):
    left: object
    right: object


class Cache:
    """As Hugging Face's caches look from outside."""

    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = []

    def update(self, key: torch.Tensor) -> None:
        self.layers.append(key)

    def get_seq_length(self) -> int:
        return len(self.layers)


def test_a_tensor_given_twice_is_saved_once_and_stays_one_tensor() -> None:
    """Identity survives, wherever the two places are."""
    x = torch.ones(2)
    arguments = Arguments((x, [x]), {"key": {"value": x}})
    (saved,) = arguments.take_tensors()
    (first, inside), keywords = arguments.rebuild([saved])
    assert saved is x
    assert first is inside[0] is keywords["key"]["value"]


def test_tensors_are_handed_over() -> None:
    """After `take_tensors` nothing here keeps a tensor alive, nested ones included."""
    arguments = Arguments((Pair(torch.ones(1), {"deep": [torch.ones(1)]}),), {})
    assert len(arguments.take_tensors()) == 2
    assert "tensor(" not in repr(vars(arguments))


def test_containers_keep_their_types_and_their_state_at_the_call() -> None:
    """Later changes by the caller are not seen, and every rebuild gives fresh containers."""
    ordered = collections.OrderedDict(b=torch.zeros(1), a=None)
    counting = collections.defaultdict(list, x=[1])
    arguments = Arguments((ordered, counting, Pair(1, "text")), {})
    ordered["late"] = counting["late"] = 1
    (first, second, third), _ = arguments.rebuild(arguments.take_tensors())
    assert (type(first), list(first)) == (collections.OrderedDict, ["b", "a"])
    assert (type(second), dict(second), second["new"]) == (collections.defaultdict, {"x": [1]}, [])
    assert third == Pair(1, "text")
    assert arguments.rebuild([torch.zeros(1)])[0][1] == {"x": [1]}


def test_a_key_value_cache_is_replayed_as_it_was() -> None:
    """What a block appends to the cache in forward is not there in the replay, nor is it appended twice."""
    cache = Cache()
    cache.update(torch.ones(1))
    arguments = Arguments((), {"past_key_values": cache})
    cache.update(torch.ones(1))
    _, rebuilt = arguments.rebuild(arguments.take_tensors())
    assert rebuilt["past_key_values"].get_seq_length() == 1
    rebuilt["past_key_values"].update(torch.ones(1))
    assert cache.get_seq_length() == 2


class Graph:
    """A user's own batch."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x, self.size, self.edges = x, len(x), {"index": x.long()}


def test_an_object_with_tensors_is_replayed_as_it_was() -> None:
    """`data.x = layer(data.x)` in one block after the other: each replay begins with its own."""
    x = torch.ones(2)
    graph = Graph(x)
    arguments = Arguments((graph, torch.distributions.Normal(x, x)), {})
    graph.x = torch.zeros(2)
    (rebuilt, normal), _ = arguments.rebuild(arguments.take_tensors())
    assert rebuilt is not graph
    assert isinstance(rebuilt, Graph)
    assert rebuilt.x is normal.loc is x
    assert rebuilt.size == 2


def test_other_objects_are_passed_on_as_they_are() -> None:
    """An object whose meaning is its identity, a module say, is never copied."""
    layer = torch.nn.Linear(1, 1)
    (passed,), _ = Arguments((layer,), {}).rebuild([])
    assert passed is layer
