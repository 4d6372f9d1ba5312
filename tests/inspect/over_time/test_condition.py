"""Conditions as people type them."""

import re

import pytest

from recckpt.inspect.over_time.condition import Compared, Condition, parse_condition

NOT_FINITE, FINITE = Compared("not finite", ">", 0.0), Compared("not finite", "=", 0.0)
ABOVE_1 = Compared("norm", ">", 1.0)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("not finite", {"comparisons": (NOT_FINITE,)}),
        ("finite", {"comparisons": (FINITE,)}),
        ("table=item norm>100", {"table": "item", "comparisons": (Compared("norm", ">", 100.0),)}),
        ("  norm  >=  1e-3 ,count<5", {"comparisons": (Compared("norm", ">=", 1e-3), Compared("count", "<", 5.0))}),
        ("norm > 1 and max != -inf", {"comparisons": (ABOVE_1, Compared("max", "!=", -float("inf")))}),
        ("id=-42", {"id": -42}),
        ('table="a table" slot=*avg finite', {"table": "a table", "slot": "*avg", "comparisons": (FINITE,)}),
        ("tensor==top.* max>1", {"tensor": "top.*", "comparisons": (Compared("max", ">", 1.0),)}),
    ],
)  # fmt: skip
def test_a_condition_is_what_its_parts_say(text, expected):
    assert parse_condition(text) == Condition(text, **expected)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "an empty condition"),
        (" , ", "an empty condition"),
        ("nan", "found 'nan' in the condition"),
        ("norm", "found 'norm' in the condition"),
        ("norm>", "found 'norm>' in the condition"),
        ("norm>1 or norm<0", "found 'or norm<0' in the condition"),
        ("norm>many", "found 'many' in the condition 'norm>many', expected a number"),
        ("norm>nan", "what is NaN or infinite is 'not finite'"),
        ("table>item", "expected table=NAME"),
        ("table=a table=b", "found table= twice"),
        ("id=1.5", "found id=1.5 in the condition 'id=1.5', expected an int64"),
        (f"id={2**63}", "expected an int64"),
        ("tensor=top.weight table=item", "found tensor= and table="),
        ("tensor=top.weight count>5", "found tensor= and count"),
        ("__import__('os').system('true')", "found \"__import__('os')"),
    ],
)
def test_what_is_no_condition_is_refused_with_its_place(text, problem):
    with pytest.raises(ValueError, match=re.escape(problem)):
        parse_condition(text)


def test_rows_and_tensors_are_meant_unless_a_part_says_which():
    def means(text):
        condition = parse_condition(text)
        return condition.is_of_rows, condition.is_of_tensors

    assert means("not finite") == means("norm>1") == (True, True)
    assert means("tensor=a* finite") == (False, True)
    assert {means(text) for text in ("table=a norm>1", "id=1", "slot=s norm>1", "count>1")} == {(True, False)}
    assert parse_condition("table=user*").means("table", "user/1")
    assert parse_condition("table=a[1]").means("table", "a[1]")
    assert not parse_condition("table=user*").means("table", "item")
