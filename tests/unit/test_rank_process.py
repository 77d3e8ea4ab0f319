"""How a rank names what went wrong."""

from flodl.errors import PlanError
from flodl.rank.process import MOST_IN_A_LINE, named, shortened


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def test_an_error_is_named_in_one_line() -> None:
    assert named(ValueError("first\nsecond")) == "ValueError: first"
    assert named(PlanError("what\nDo this.")) == "PlanError: what. Do this."
    assert named(KeyboardInterrupt()) == "KeyboardInterrupt"


def test_an_error_without_words_of_its_own_is_named_too() -> None:
    assert "Mute" in named(Mute())


def test_an_endless_message_is_cut_in_its_middle() -> None:
    words = named(ValueError("a" * 5_000_000 + "z"))
    assert len(words) < MOST_IN_A_LINE + 50
    assert words.startswith("ValueError: aaa")
    assert words.endswith("aaz")
    assert f"{5_000_013 - MOST_IN_A_LINE} characters" in words
    assert shortened("abc", 3) == "abc"
    assert shortened("abcdefghij", 3) == "a [... 7 characters ...] ij"
