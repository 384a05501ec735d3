"""Fine-tune a Llama with LoRA, plain and checkpointed, and print that it is the same training in less memory.

    python examples/train_llama.py

Hugging Face's model and PEFT's adapters, with random weights from a configuration: nothing is downloaded. The base
weights are frozen, and so is what goes into the first block, which asks for nothing more: no `use_reentrant`, no
`enable_input_require_grads`. On a CPU the script counts every byte of PyTorch's allocator.
"""

import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.callbacks import LambdaCallback
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from lightning_ckpt import ActivationCheckpointing
from lightning_ckpt.memory import AllocatorReader
from lightning_ckpt.sizes import format_size

warnings.filterwarnings("ignore", ".*does not have many workers.*")

LENGTH = 128


class FineTuning(L.LightningModule):
    """A small Llama over bytes, of which only the adapters of its linear layers are trained."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 6, "num_attention_heads": 4}
        llama = LlamaForCausalLM(LlamaConfig(vocab_size=256, max_position_embeddings=LENGTH, **sizes))
        self.model = get_peft_model(llama, LoraConfig(r=16, lora_dropout=0.1, target_modules="all-linear"))
        self.losses: list[Tensor] = []

    def training_step(self, rows: Tensor, batch_idx: int) -> Tensor:
        loss = self.model(input_ids=rows, labels=rows).loss
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW((weight for weight in self.parameters() if weight.requires_grad), lr=1e-2)

    def adapters(self) -> list[Tensor]:
        """What a checkpoint of the adapters holds."""
        return list(get_peft_model_state_dict(self.model).values())


def text() -> Tensor:
    """Bytes of Python's own library, in rows."""
    source = Path(sysconfig.get_path("stdlib"), "typing.py").read_bytes()
    rows = torch.frombuffer(bytearray(source), dtype=torch.uint8)
    return rows[: len(rows) // LENGTH * LENGTH].view(-1, LENGTH).long()


def train(policy: str) -> tuple[FineTuning, int]:
    """Train 12 steps, and return the module and the peak of the last one."""
    L.seed_everything(0, verbose=False)
    module = FineTuning()
    callbacks = [] if policy == "none" else [ActivationCheckpointing(policy, monitor=False)]
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    with AllocatorReader() as reader:
        callbacks.append(LambdaCallback(on_train_batch_start=lambda *_: reader.reset_peak()))
        trainer = L.Trainer(accelerator="cpu", max_steps=12, callbacks=callbacks, enable_model_summary=False, **quiet)
        trainer.fit(module, DataLoader(text(), batch_size=8, shuffle=True, drop_last=True))
        return module, reader.peak()


def main() -> None:
    (plain, most), (module, least) = train("none"), train("full")
    table = Table("policy", "peak of a step", "first loss", "last loss", title="A Llama with LoRA")
    for policy, trained, peak in (("none", plain, most), ("full", module, least)):
        table.add_row(policy, format_size(peak), f"{trained.losses[0]:.3f}", f"{trained.losses[-1]:.3f}")
    Console().print(table)
    assert all(map(torch.equal, [*module.losses, *module.adapters()], [*plain.losses, *plain.adapters()]))
    print(f"All {len(plain.losses)} losses and all {len(plain.adapters())} adapters are equal, bit for bit.")


if __name__ == "__main__":
    main()
