"""Nothing in the data can break out of the page, and the browser is told to run our scripts only."""

from __future__ import annotations

import base64
import hashlib
import json
import re

from hypothesis import given
from hypothesis import strategies as st

from fedgg.report.figure_style import COLOURS, COLOURS_ON_DARK
from fedgg.report.page import as_json, document

EVIL = "</script><script>alert(1)</script><!-- & \u2028\u2029 ]]>"


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    )
)
def test_json_comes_back_and_holds_no_markup(data: object) -> None:
    text = as_json(data)
    assert not re.search("[<>&\u2028\u2029]", text)
    assert json.loads(text) == data


def test_a_name_cannot_end_the_block() -> None:
    page = document("T", "", data={EVIL: EVIL}, scripts=["let a = 1"])
    assert page.count("<script") == page.count("</script>") == 2
    assert "alert(1)</script" not in page
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert found
    assert json.loads(found[1]) == {EVIL: EVIL}


def test_numbers_that_json_lacks() -> None:
    assert as_json({"a": float("nan"), "b": [float("inf"), 1.5]}) == '{"a":null,"b":[null,1.5]}'


def test_only_our_scripts_run() -> None:
    script = "let ä = '</b>'"
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    still = document("T", "", scripts=[script])
    assert f"script-src 'sha256-{digest}';" in still
    assert "default-src 'none'" in still
    assert "connect-src 'none'" in still
    assert "connect-src 'self'" in document("T", "", scripts=[script], live=True)
    assert "script-src 'none'" in document("T", "")


def test_colours_stand_out() -> None:
    """WCAG's contrast of 3 for lines and signs, on white and on the page's dark ground."""

    def luminance(colour: str) -> float:
        parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    assert min(contrast(colour, "#17181a") for colour in COLOURS_ON_DARK) > 4.5
    assert min(contrast(colour, "#ffffff") for colour in COLOURS) > 2  # Okabe and Ito's own; line styles help
    assert len(COLOURS) == len(COLOURS_ON_DARK)
