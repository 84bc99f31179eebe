"""From a prompt to how it goes on: order, company, draws, stops, streams, the way out and published models."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import weft
from weft import api, cli, folder
from weft.api import LanguageModel
from weft.config import BOS, EOS, Recipe
from weft.data.tokenizers import TokenizerPair
from weft.data.vocabulary import train_tokenizer
from weft.models import build

TEXT = ["O Romeo, Romeo! wherefore art thou Romeo?", "Deny thy father and refuse thy name;\n"]
PROMPTS = ["O Romeo", "name", "wherefore art thou", "f", "thy father and re"]


def model_of(kind: str = "char", seed: int = 5, overrides: tuple[str, ...] = (), **sizes: Any) -> LanguageModel:
    model = {"dim": 16, "num_heads": 2, "ffn_dim": 32, "num_layers": 2, "max_len": 32, **sizes}
    tree = {"task": "language", "model": model, "tokenizer": {"kind": kind, "vocab_size": 300}}
    recipe = Recipe.make({**tree, "decoding": {"max_extra": 12}}, overrides)
    vocabulary = train_tokenizer(TEXT, recipe.tokenizer)
    torch.manual_seed(seed)
    made = build(recipe.model, vocabulary.vocab_size, vocabulary.vocab_size).eval()
    for name, parameter in made.named_parameters():
        if parameter.dim() > 1:  # larger than at the start of training, so that prompts differ in what they give
            parameter.data *= 12.0 if "embedding" in name else 4.0
    return LanguageModel.trained(made, recipe, vocabulary)


@pytest.fixture(scope="module")
def chars() -> LanguageModel:
    return model_of()


def logits_after(model: LanguageModel, ids: list[int]) -> torch.Tensor:
    module = cast(Any, model.model)
    with torch.no_grad():
        logits = module.logits(module(torch.tensor([ids])))[0, -1]
    logits[list(module.specials.never)] = float("-inf")
    return cast(torch.Tensor, logits)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_temperature_0_takes_the_likeliest_token_at_each_step(kind: str) -> None:
    model = model_of(kind)
    found = model.generate("O Rom", temperature=0, max_tokens=6)
    ids = list(found.prompt_ids)
    for token in found.n_best[0].ids:
        assert int(logits_after(model, ids).argmax()) == token
        ids.append(token)
    assert found.full == model.vocabulary.decode(ids) == "O Rom" + found.text
    assert found.text == model.generate("O Rom", sample=False, max_tokens=6).text
    assert len(found.n_best[0].ids) == 6 or found.n_best[0].finished


def test_a_prompt_goes_on_alike_alone_and_in_company(chars: LanguageModel) -> None:
    together = chars.generate(PROMPTS, seed=3, exact=True)
    assert len({found.text for found in together}) == len(PROMPTS)
    for prompt, found in zip(PROMPTS, together, strict=True):
        assert chars.generate(prompt, seed=3, exact=True) == found
    assert chars.generate(PROMPTS[::-1], seed=3, exact=True, batch_tokens=1) == together[::-1]
    assert [found.text for found in chars.generate(PROMPTS, seed=4)] != [found.text for found in together]
    one, other = chars.generate(["Romeo", "Romeo"], seed=3)
    assert one.text != other.text
    assert one.text == chars.generate("Romeo", seed=3).text


def test_many_continuations_come_most_probable_first(chars: LanguageModel) -> None:
    found = chars.generate("O Romeo", n=10, seed=1)
    log_probs = [best.log_prob for best in found.n_best]
    assert len(log_probs) == 10
    assert log_probs == sorted(log_probs, reverse=True)
    assert (found.text, found.log_prob) == (found.n_best[0].text, log_probs[0])
    for best in found.n_best[:3]:
        ids, total = list(found.prompt_ids), 0.0
        module = cast(Any, chars.model)
        for token in (*best.ids, EOS)[: len(best.token_log_probs)]:
            with torch.no_grad():
                total += float(module.logits(module(torch.tensor([ids])))[0, -1].log_softmax(-1)[token])
            ids.append(token)
        assert best.log_prob == pytest.approx(total, abs=1e-4)
    alone = {best.text for n in (1, 4) for best in chars.generate("O Romeo", n=n, seed=1).n_best}
    assert alone <= {best.text for best in found.n_best}


def test_a_beam_finds_what_is_at_least_as_probable(chars: LanguageModel) -> None:
    greedy = chars.generate("O Romeo", beam=1, max_tokens=5)
    found = chars.generate("O Romeo", beam=8, n=4, max_tokens=5)
    assert found.score >= greedy.score
    assert len(found.n_best) == 4


def test_a_stop_ends_a_text_and_is_not_part_of_it(chars: LanguageModel) -> None:
    whole = chars.generate("O Romeo", seed=2, max_tokens=30).text
    assert len(whole) > 8
    for stop in (whole[4:6], whole[3], whole[:2]):
        found = chars.generate("O Romeo", seed=2, max_tokens=30, stop=stop)
        assert found.text == whole[: whole.index(stop)]
        assert found.n_best[0].finished
        assert "".join(chars.stream("O Romeo", seed=2, max_tokens=30, stop=[stop, "#"])) == found.text
    several = chars.generate(["O Romeo", "name"], seed=2, max_tokens=30, n=3, stop=[whole[4:6], whole[2]])
    assert all(whole[2] not in best.text for found in several for best in found.n_best)


@pytest.mark.parametrize("kind", ["char", "bpe"])
def test_a_stream_comes_in_pieces_and_is_the_whole(kind: str) -> None:
    model = model_of(kind)
    for seed in range(5):
        pieces = list(model.stream("thy ", seed=seed, max_tokens=20))
        assert "".join(pieces) == model.generate("thy ", seed=seed, max_tokens=20).text
        assert len(pieces) > 3 or kind == "bpe"
    stream = model.stream("thy ", seed=1, max_tokens=100_000)
    assert next(stream)
    cast(Any, stream).close()  # ends the work, or this test would take for ever


def test_text_goes_on_beyond_the_context(chars: LanguageModel) -> None:
    found = chars.generate("O Romeo", seed=1, max_tokens=100)
    assert len(found.n_best[0].ids) == 100 or found.n_best[0].finished
    long = "O Romeo, Romeo! wherefore art thou Romeo? " * 3
    assert chars.generate(long, temperature=0, max_tokens=4).text  # the end of it is what the model sees
    with pytest.raises(ValueError, match="max_len is 32"):
        cast(Any, chars.model).step(torch.full((1, 40), 5), cast(Any, chars.model).start(torch.tensor([[5]])))
    ids = chars.vocabulary.encode_batch([long])[0]
    seen = len(ids) - int(chars._endless._begins(torch.tensor([len(ids)])))  # type: ignore[attr-defined]
    assert 16 <= seen <= 32
    module = cast(Any, chars.model)
    with torch.no_grad():
        expected = module.logits(module(torch.tensor([ids[-seen:]])))[0, -1].softmax(-1).max()
    assert chars.next(long)[0].probability == pytest.approx(float(expected), abs=1e-5)


def test_nothing_to_go_on_from() -> None:
    with_end = model_of()
    assert with_end.generate("", seed=1).prompt_ids == (EOS,)
    lines = model_of(overrides=("data.end=false",))
    assert lines.generate("", seed=1).prompt_ids == tuple(lines.vocabulary.encode_batch(["\n"])[0])
    for seed in range(20):
        assert EOS not in lines.generate("O", seed=seed, max_tokens=20).n_best[0].ids
    words = model_of("word", overrides=("data.end=false", "data.split=line"))
    with pytest.raises(ValueError, match="no token that begins a text: give some text"):
        words.generate("")


def test_scores_and_next_tokens_are_the_models_own(chars: LanguageModel) -> None:
    found = chars.score(", Romeo!", prompt="O Romeo")
    ids = list(found.prompt_ids)
    for token, log_prob in zip(found.n_best[0].ids, found.n_best[0].token_log_probs, strict=True):
        module = cast(Any, chars.model)
        with torch.no_grad():
            expected = module.logits(module(torch.tensor([ids])))[0, -1].log_softmax(-1)[token]
        assert log_prob == pytest.approx(float(expected), abs=1e-5)
        ids.append(token)
    assert chars.vocabulary.decode(ids) == "O Romeo, Romeo!"
    choices = chars.next("O Romeo", k=5)
    module = cast(Any, chars.model)
    with torch.no_grad():
        shares = module.logits(module(torch.tensor([list(found.prompt_ids)])))[0, -1].softmax(-1)
    assert [choice.probability for choice in choices] == pytest.approx(shares.topk(5).values.tolist(), abs=1e-6)
    assert len(chars.score("a" * 80, prompt="O").n_best[0].token_log_probs) == 80  # more than the context holds


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temprature": 1.0}, "unknown option 'temprature'; did you mean 'temperature'?"),
        ({"n": 0}, "≥ 1"),
        ({"stop": [""]}, "a stop must be some text"),
        ({"beam": 3, "stop": "a"}, "stop is for draws"),
        ({"beam": 3, "top_k": 2}, "top_k needs sample=True"),
        ({"max_tokens": -1}, "≥ 0"),
        ({"top_p": 2.0}, "top_p must be"),
        ({"typical_p": 0.0}, "typical_p"),
        ({"repetition_penalty": -1.0}, "repetition_penalty"),
    ],
)
def test_what_is_wrong_is_named(chars: LanguageModel, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        chars.generate("O", **options)


def test_one_text_is_streamed_at_a_time(chars: LanguageModel) -> None:
    with pytest.raises(ValueError, match="a beam of 2 has no text before its end"):
        chars.stream("O", beam=2)
    with pytest.raises(ValueError, match="one continuation can be streamed, not 2"):
        chars.stream("O", n=2)


def test_results_show_themselves(chars: LanguageModel) -> None:
    found = chars.generate("O Romeo", n=2, seed=1)
    assert str(found) == found.text
    assert repr(found).startswith("Continuation('O Romeo' + ")
    tree = json.loads(found.json())
    assert [each["text"] for each in tree["n_best"]] == [best.text for best in found.n_best]
    assert tree["prompt"] == "O Romeo"
    assert found._repr_html_().count("<tr>") == 2
    assert "".join(found.prompt_tokens).replace("▁", " ") == "O Romeo"
    assert repr(chars).startswith("LanguageModel(gpt, ")


def test_a_model_folder_is_loaded_as_what_it_is(tmp_path: Path, chars: LanguageModel) -> None:
    tokenizer = cast(Any, chars.vocabulary)
    folder.save(tmp_path / "m", chars.model, chars.recipe, TokenizerPair(tokenizer, tokenizer), "card")
    loaded = weft.load(tmp_path / "m", precision="fp32")
    assert isinstance(loaded, LanguageModel)
    assert loaded.generate("O Romeo", seed=7).text == chars.generate("O Romeo", seed=7).text
    with pytest.raises(ValueError, match="is a language model, which generates and does not translate"):
        api.load_translator(tmp_path / "m")


LLAMA = {"positions": "rotary", "norm": "rms", "activation": "swiglu", "bias": False, "tie": False, "num_kv_heads": 1}


@pytest.mark.parametrize("sizes", [{}, LLAMA], ids=["gpt2", "llama"])
def test_the_way_out_and_back(tmp_path: Path, sizes: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    model = model_of("bpe", activation=sizes.pop("activation", "gelu_tanh") if sizes else "gelu_tanh", **sizes)
    tokenizer = cast(Any, model.vocabulary)
    folder.save(tmp_path / "m", model.model, model.recipe, TokenizerPair(tokenizer, tokenizer), "card")
    assert cli.main(["convert", str(tmp_path / "m"), str(tmp_path / "out")]) == 0
    assert "a folder of transformers" in capsys.readouterr().out
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = model.generate("O Romeo", temperature=0).prompt_ids
    module = cast(Any, model.model)
    with torch.no_grad():
        ours = module.logits(module(torch.tensor([list(ids)])))
        close = (ours - theirs(torch.tensor([list(ids)])).logits).abs().max() / ours.abs().max()
    assert float(close) < 1e-5
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert words("O Romeo, thy\nname")["input_ids"] == model.vocabulary.encode_batch(["O Romeo, thy\nname"])[0]
    assert (words.eos_token_id, words.pad_token_id) == (EOS, 0)
    back = weft.load(tmp_path / "out", precision="fp32")
    assert isinstance(back, LanguageModel)
    fixed = {"temperature": 0, "max_tokens": 12}
    assert back.generate("O Romeo", **fixed).text == model.generate("O Romeo", **fixed).text
    assert cli.main(["convert", str(tmp_path / "m"), str(tmp_path / "out")]) == 2  # it is not overwritten
    assert "holds a model already" in capsys.readouterr().err


def test_what_opens_a_text_and_what_ends_it_goes_out_too(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    apart = model_of("bpe", overrides=("data.sample=documents",), activation="gelu_tanh")
    assert apart.opening == (BOS,)
    apart.export(tmp_path / "apart")
    back = weft.load(tmp_path / "apart", precision="fp32")
    assert isinstance(back, LanguageModel)
    assert back.opening == (BOS,)
    fixed = {"temperature": 0, "max_tokens": 12}
    assert back.generate("O Romeo", **fixed).n_best[0].ids == apart.generate("O Romeo", **fixed).n_best[0].ids
    words = transformers.AutoTokenizer.from_pretrained(tmp_path / "apart")
    assert words("O Romeo")["input_ids"] == list(apart.generate("O Romeo", **fixed).prompt_ids)
    config = tmp_path / "apart" / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "add_bos_token": False}))
    assert cast(Any, weft.load(tmp_path / "apart")).opening == ()
    endless = model_of("bpe", overrides=("data.end=false",), activation="gelu_tanh")
    endless.export(tmp_path / "endless")
    assert json.loads((tmp_path / "endless" / "config.json").read_text())["eos_token_id"] is None
    again = cast(Any, weft.load(tmp_path / "endless"))
    assert not any(again.generate("O", seed=seed, max_tokens=50).n_best[0].finished for seed in range(8))


def test_several_tokens_may_end_a_text(tmp_path: Path) -> None:
    model = model_of("bpe", activation="gelu_tanh")
    model.export(tmp_path / "m")
    fixed = {"seed": 5, "max_tokens": 20}
    whole = model.generate("O Romeo", **fixed).n_best[0].ids
    end = next(token for place, token in enumerate(whole) if place > 1 and token not in whole[:place])
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "eos_token_id": [EOS, end], "pad_token_id": -1}))
    found = cast(Any, weft.load(tmp_path / "m", precision="fp32")).generate("O Romeo", **fixed)
    assert found.n_best[0].ids == whole[: whole.index(end)]
    assert found.n_best[0].finished
    beam = cast(Any, weft.load(tmp_path / "m", precision="fp32")).generate("O Romeo", beam=3, n=3, max_tokens=20)
    assert all(end not in best.ids for best in beam.n_best)


def test_a_model_may_have_more_rows_than_the_vocabulary_has_tokens(tmp_path: Path) -> None:
    model = model_of(activation="gelu_tanh")
    module, size = cast(Any, model.model), model.vocabulary.vocab_size
    wide = build(model.recipe.model, size + 6, size + 6).eval()
    state = {**module.state_dict(), "embedding": torch.cat([module.embedding.data, 9 * module.embedding.data[4:10]])}
    wide.load_state_dict(state)
    LanguageModel.trained(wide, model.recipe, model.vocabulary).export(tmp_path / "m")
    loaded = weft.load(tmp_path / "m", precision="fp32")
    assert isinstance(loaded, LanguageModel)
    assert max(loaded.generate("O Romeo", seed=1, max_tokens=40).n_best[0].ids) < size
    assert any(choice.token.startswith("#") for choice in loaded.next("O Romeo", k=100))
    assert loaded.walk("O Romeo").draw.chosen < size


def test_prompts_come_as_a_stream(chars: LanguageModel) -> None:
    read: list[str] = []

    def prompts() -> Iterator[str]:
        for prompt in PROMPTS:
            read.append(prompt)
            yield prompt

    found = chars.generate_lines(prompts(), window=2, seed=3, exact=True)
    assert next(found) == chars.generate(PROMPTS[0], seed=3, exact=True)
    assert len(read) == 2
    assert [each.prompt for each in found] == PROMPTS[1:]


def test_the_shell_generates(tmp_path: Path, chars: LanguageModel, capsys: pytest.CaptureFixture[str]) -> None:
    tokenizer = cast(Any, chars.vocabulary)
    out = str(tmp_path / "m")
    folder.save(out, chars.model, chars.recipe, TokenizerPair(tokenizer, tokenizer), "card")
    fixed = ["--precision", "fp32", "--seed", "3"]
    assert cli.main(["generate", out, "O Romeo", *fixed]) == 0
    assert capsys.readouterr().out == chars.generate("O Romeo", seed=3).full + "\n"
    assert cli.main(["generate", out, "O Romeo", "name", *fixed, "--json", "--n", "2"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["text"] for line in lines] == [f.text for f in chars.generate(["O Romeo", "name"], seed=3, n=2)]
    assert cli.main(["translate", out, "O Romeo"]) == 2
    assert "is a language model" in capsys.readouterr().err
    assert cli.main(["generate", out, "O", "--top-p", "3"]) == 2
    assert capsys.readouterr().err.startswith("weft: error: top_p must be")


def test_a_published_model_tells_its_story(weft_weights: Path) -> None:
    path = weft_weights / "stories260K" / "stories260K.bin"
    if not path.is_file():
        pytest.skip(f"{weft_weights} has no stories260K")
    model = weft.load(path, precision="fp32")
    assert isinstance(model, LanguageModel)
    found = model.generate("Once upon a time", temperature=0, max_tokens=60)
    assert found.full.startswith(
        "Once upon a time, there was a little girl named Lily. She loved to play outside in the"
    )
    assert "".join(model.stream("Once upon a time", temperature=0, max_tokens=60)) == found.text
    assert model.generate("", temperature=0, max_tokens=60).full.lstrip().startswith("Once upon a time, there was")
