"""Numbers of parameters as people write them: 190M, 2.5k."""

from __future__ import annotations

from flodl.errors import PlanError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
LARGEST = 4_000_000_000


def parse_size(text: str, field: str = "params") -> int:
    """Raises PlanError naming the field unless it is a whole number from 1,000 on, with k, M or G if wanted."""
    number, unit = (text[:-1], text[-1].lower()) if text[-1:].isalpha() else (text, "")
    try:
        size = float(number) * _UNITS[unit]
    except (ValueError, KeyError):
        size = 0.0
    if not 1000 <= size <= LARGEST or size != int(size):
        raise PlanError(
            f"{field} is {text!r}\nAllowed: a number from 1k to 4G, such as 190M or 2500000.", field=field, value=text
        )
    return int(size)


def format_size(count: int) -> str:
    """190000000 -> 190M."""
    for unit, factor in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= factor and count % (factor // 10) == 0:
            return f"{count / factor:g}{unit}"
    return str(count)
