"""Key-value caches of language models: none is filled in training, and nothing else about them changes."""

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_ckpt import caches, checkpoint_blocks
from lightning_ckpt.caches import outermost, turn_caches_off
from zoo import llama, t5


@pytest.fixture(autouse=True)
def _untold() -> None:
    caches._tell.cache_clear()


def tokens() -> Tensor:
    return torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(0))


def cache_of(model: nn.Module, **given: Any) -> Any:
    """What a call returns for the next one to go on from."""
    return model(input_ids=tokens(), labels=tokens(), **given).past_key_values


@pytest.mark.parametrize("build", [llama, t5])
def test_no_cache_is_filled_in_training(build: Any) -> None:
    """Off while blocks are checkpointed and gradients are recorded; on in evaluation, and again at the end."""
    model = build()
    before = copy.deepcopy(model.config.to_dict())
    assert cache_of(model) is not None
    with checkpoint_blocks(model):
        assert cache_of(model) is None
        assert model.config.to_dict() == before
        with torch.no_grad():
            assert cache_of(model) is not None
    assert cache_of(model) is not None
    assert not any(module._forward_pre_hooks for module in model.modules())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")  # the newer name is not everywhere
def test_a_cache_that_is_asked_for_is_filled() -> None:
    """`use_cache=True` in a call, by keyword or by position, or a cache that the caller brings."""
    from transformers import DynamicCache

    model = llama()
    with checkpoint_blocks(model):
        assert cache_of(model, use_cache=True).get_seq_length() == 6
        assert cache_of(model, past_key_values=DynamicCache(config=model.config)).get_seq_length() == 6
        assert model(tokens(), None, None, None, None, None, True).past_key_values.get_seq_length() == 6


def test_one_line_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    """It names the outermost parts, says that the configuration stays, and what overrules it."""
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        for _ in range(2):
            checkpoint_blocks(nn.ModuleDict({"student": t5(), "other": nn.Linear(2, 2)})).remove()
    assert [record.getMessage() for record in caplog.records] == [
        "use_cache is on in 'student': turned off in training while blocks are checkpointed; the configuration stays "
        "as it is, and use_cache=True in a call is obeyed"
    ]


def test_nothing_is_said_or_done_where_nothing_is_to_do(caplog: pytest.LogCaptureFixture) -> None:
    """A configuration with it off, and a model none of whose blocks is checkpointed."""
    off, teacher = llama(), llama()
    off.config.use_cache = False
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        turn_caches_off(off, ["model.layers.0"])
        checkpoint_blocks(nn.ModuleDict({"off": off, "teacher": teacher}), blocks="off.model.layers.*")
    assert not caplog.records
    assert cache_of(teacher) is not None


def test_other_ranks_say_nothing(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is the first rank's."""
    monkeypatch.setattr(caches, "is_first_rank", lambda: False)
    with caplog.at_level(logging.WARNING, "lightning_ckpt"):
        checkpoint_blocks(llama())
    assert not caplog.records


def test_a_copy_fills_none_either() -> None:
    """A copied model is checkpointed as the original, and trains like it."""
    model = llama()
    with checkpoint_blocks(model):
        copied = copy.deepcopy(model)
    assert cache_of(copied) is None
    assert cache_of(model) is not None


def test_outermost_names_are_those_in_no_other() -> None:
    """The model's own name is empty and holds all others; a common beginning is no nesting."""
    assert outermost(["a", "a.b", "ab", "c.d"]) == ["a", "ab", "c.d"]
    assert outermost(["", "a", "b"]) == [""]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler looks at every tensor
def test_a_compiled_model_fills_none_without_a_graph_break() -> None:
    """The hook that turns it off is compiled with the rest."""
    model = llama()
    with checkpoint_blocks(model):
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        out = compiled(input_ids=tokens(), labels=tokens())
        out.loss.backward()
    assert out.past_key_values is None
