"""`lightning-ckpt explain`: the arithmetic of activation checkpointing, drawn."""

from dataclasses import asdict

from jsonargparse import ArgumentParser, Namespace

from lightning_ckpt.cli._command import UsageError, command_parser, print_json
from lightning_ckpt.sizes import format_size, parse_size
from lightning_ckpt.theory import LEFT_OUT, Chain, best_segment_size, best_segments

KEPT, DROPPED, REPLAYED = "●", "·", "○"
ROW = 32  # layers a line
DRAWN = 4 * ROW  # longer chains are told, not drawn

_EXAMPLES = """\
  lightning-ckpt explain --layers 16 --activation 8MiB --segments 4
  lightning-ckpt explain --layers 100 --activation 64MiB          (segments: the best number)
  lightning-ckpt explain --layers 16 --activation 8MiB --json"""


def parser() -> ArgumentParser:
    """Return the command's parser."""
    command = command_parser("Explain what checkpointing a chain of equal layers saves and costs.", _EXAMPLES)
    command.add_argument("--layers", type=int, default=16, help="number of layers")
    command.add_argument("--activation", type=str, default="8MiB", help="size of one layer's output, like 8MiB")
    command.add_argument("--segments", type=int | None, default=None, help="number of segments; left out: the best")
    return command


def run(options: Namespace) -> int:
    """Print the explanation; return the exit code."""
    try:
        size = parse_size(options.activation, name="activation")
        segments = options.segments if options.segments is not None else best_segments(options.layers)
        chain = Chain(layers=options.layers, segments=segments, activation_bytes=size)
    except ValueError as error:
        raise UsageError(f"explain: {error}") from error
    if options.json:
        print_json(numbers(chain))
    else:
        print(text(chain))
    return 0


def numbers(chain: Chain) -> dict[str, object]:
    """Return every number of the explanation; sizes in bytes, costs in units of one layer's forward pass."""
    properties = [name for name, value in vars(Chain).items() if isinstance(value, property)]
    return {
        **asdict(chain),
        **{name: getattr(chain, name) for name in properties},
        "best_segment_size": best_segment_size(chain.layers),
        "best_segments": best_segments(chain.layers),
        "left_out": list(LEFT_OUT),
    }


def text(chain: Chain) -> str:
    """Return the explanation for a person: a drawing, the numbers, and what the model leaves out."""
    return "\n\n".join([drawing(chain), _arithmetic(chain), _omissions()])


def drawing(chain: Chain) -> str:
    """Draw the chain's tensors three times: plain, with its bookmarks, and while its last segment replays."""
    if chain.layers > DRAWN:
        return f"(a chain of {chain.layers} layers is too long to draw)"
    legend = f"{KEPT} kept   {DROPPED} dropped   {REPLAYED} made again for its segment's backward pass"
    return "\n".join([*(_drawn(name, row) for name, row in rows(chain).items()), "", legend])


def rows(chain: Chain) -> dict[str, list[str]]:
    """Return a symbol for each tensor of the chain: plain, with its bookmarks, and while its last segment replays."""
    tensors, marks = range(chain.plain_tensors), set(chain.boundaries)
    last = range(chain.boundaries[-2] + 1, chain.plain_tensors)
    bookmarks = [KEPT if tensor in marks else DROPPED for tensor in tensors]
    replay = [REPLAYED if tensor in last else symbol for tensor, symbol in enumerate(bookmarks)]
    return {"plain": [KEPT] * chain.plain_tensors, "checkpointed": bookmarks, "replaying": replay}


def _drawn(name: str, symbols: list[str]) -> str:
    starts = range(0, len(symbols), ROW) if len(symbols) > ROW + 1 else [0]
    lines = ["─".join(symbols[start : start + ROW + (len(starts) == 1)]) for start in starts]
    return "\n".join(f"{name if not number else '':<14}{line}" for number, line in enumerate(lines))


def _arithmetic(chain: Chain) -> str:
    saved = f"{format_size(chain.saved_bytes):>23}   {chain.saved_fraction:.1%} of plain"
    size, exact = best_segment_size(chain.layers), best_segment_size(chain.layers) ** 2 == chain.layers
    lines = {
        "plain": _tensors(chain.plain_tensors, chain.plain_bytes),
        "boundaries": _tensors(chain.boundary_tensors, chain.boundary_bytes),
        "scratch": f"{_tensors(chain.scratch_tensors, chain.scratch_bytes)}   while one segment replays",
        "peak": _tensors(chain.peak_tensors, chain.peak_bytes),
        "saved": f"{saved}\n",
        "cost": f"{chain.plain_cost:.12g} units plain (forward 1, backward 2 a layer), "
        f"{chain.checkpointed_cost:.12g} with one replay: {chain.extra_cost_fraction:.1%} more",
        "best": f"segments of {size}, the square root of {_layers(chain.layers)}{'' if exact else ' rounded up'}: "
        f"{best_segments(chain.layers)} of them",
    }
    return "\n".join(f"{name:<14}{line}" for name, line in lines.items())


def _layers(count: int) -> str:
    return "1 layer" if count == 1 else f"{count} layers"


def _tensors(count: int, size: int) -> str:
    return f"{count:>3} {'tensor ' if count == 1 else 'tensors'}{format_size(size):>12}"


def _omissions() -> str:
    return "\n".join(["What this model leaves out:", *(f"- {sentence}" for sentence in LEFT_OUT)])
