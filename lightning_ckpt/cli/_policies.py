"""Policies as they are written on the command line, plain training among them."""

from lightning_ckpt.cli._command import UsageError
from lightning_ckpt.policies import Policy
from lightning_ckpt.policy_names import resolve_policy

PLAIN = "none"
POLICIES_HELP = (
    "policies by comma: none, full, selective, auto, with their options after colons: full:every=2, "
    "full:segment_size=sqrt, full:select=first-4, selective:attention, auto:0.5"
)


def parse_policies(text: str) -> dict[str, Policy | None]:
    """Return the policies of a list, by how each is written; None stands for plain training.

    Raises:
        UsageError: the list is empty, or has a policy that does not exist.
    """
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise UsageError(f"--policies {text!r}: names no policy: give {POLICIES_HELP}")
    return {name: parse_policy(name) for name in names}


def parse_policy(text: str) -> Policy | None:
    """Return the policy that is meant; None stands for plain training.

    Raises:
        UsageError: no such policy or option, or a value that the policy does not accept.
    """
    if text == PLAIN:
        return None
    try:
        return resolve_policy(text)
    except ValueError as error:
        raise UsageError(str(error)) from error
