"""The Lightning callbacks: the only rooms that know Lightning."""
