"""The page shows the numbers that bertviz is given, for a model of BERT's shape; and it needs nothing from the web."""

from __future__ import annotations

import base64
import json
import re

import numpy as np
import pytest
import torch

from weft.observe import Record
from weft.views.html import page

transformers = pytest.importorskip("transformers")
bertviz = pytest.importorskip("bertviz", reason="bertviz is not installed (it brings IPython)")

TOKENS = ["[CLS]", "the", "animal", "was", "too", "tired", "[SEP]"]


def test_the_page_has_the_numbers_that_bertviz_has() -> None:
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=30, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=64
    )
    config._attn_implementation = "eager"
    with torch.no_grad():
        model = transformers.BertModel(config).eval()
        attentions = model(torch.arange(1, 8)[None], output_attentions=True).attentions
    theirs = bertviz.head_view(attentions, TOKENS, html_action="return").data
    numbers, _ = json.JSONDecoder().raw_decode(theirs.partition("const params = ")[2])
    expected = np.array(numbers["attention"][0]["attn"])  # [layer, head, query, key]
    assert numbers["attention"][0]["left_text"] == TOKENS

    ours = page(Record.of(attentions, TOKENS), exact=True)
    shown = json.loads(ours.partition('<script type="application/json" id="record">')[2].partition("</script>")[0])
    assert shown["sequences"][0]["labels"] == TOKENS
    (place,) = shown["places"]
    found = np.stack([_decoded(layer["weights"]) for layer in place["layers"]])
    np.testing.assert_array_equal(found, expected.astype(np.float32))
    assert not re.findall(r'(?:src|href)="?https?:', ours)
    assert re.findall(r'src="https?:', theirs), "bertviz loads its scripts from the web"


def _decoded(array: dict[str, object]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    data = base64.b64decode(str(array["data"]))
    return np.frombuffer(data, "<f4").reshape(array["shape"]).astype(np.float32)  # type: ignore[call-overload, no-any-return]
