"""Corpora: text in one or two languages from files or by name, and the named sets: origin, licence and checksums.

    pairs = open_pairs("train.tsv")                       # source TAB target, a pair a line
    pairs = open_pairs("train.en,train.de")               # or ["train.en", "train.de"]: line by line
    pairs = open_pairs("multi30k:train", "en", "de")      # a part of a named set
    paths = text_paths("books/,letters.txt")              # text in one language: files and folders
    paths = text_paths("wikitext-2:train")

What a file may be like is told in text.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from weft.config import nearest
from weft.config.places import cache_folder
from weft.data.download import Progress, digest, fetch
from weft.data.text import Lines, ParallelText, content_digest, existing


def open_pairs(spec: str | Sequence[str], source: str = "", target: str = "", swap: bool = False) -> ParallelText:
    """Parallel text from files or from a named set.

    Args:
        spec: a TSV file, of which the first two columns count; two files whose lines belong together, as a list or
            with a comma between; or a set and its part, such as "multi30k:train".
        source, target: the languages as they stand there; a set of more than two languages needs them.
        swap: read the pairs the other way round, languages too.

    Raises:
        ValueError: if the spec, the languages or the first line are not as expected.
        OSError: if a file is missing, naming the nearest; or a set, saying how to get it.
    """
    given = [spec] if isinstance(spec, str) else list(spec)
    if len(given) == 1 and not Path(given[0]).is_file():
        if found := set_part(given[0]):
            chosen, part = found
            text = chosen.open(part, source, target)
            return text.swapped() if swap else text
        given = given[0].split(",")
    if not 1 <= len(given) <= 2 or not all(given):
        raise ValueError(f"expected a TSV file, two files or a set and its part, such as multi30k:train, not {spec!r}")
    files = tuple(existing(name) for name in given)
    for path in files:
        if not path.is_file():
            raise OSError(f"{path} can be read only once: expected a file")
        if next(iter(Lines(path)), None) is None:
            raise ValueError(f"{path} is empty: expected a pair a line")
    text = ParallelText(files, ", ".join(path.name for path in files), source, target)
    text = text.swapped() if swap else text
    next(iter(text))  # a wrong kind of file is told before any work is done
    return text


def text_paths(spec: str | Sequence[str]) -> tuple[Path, ...]:
    """The files and folders of a text in one language, each there, for ``weft.data.documents``.

    Args:
        spec: a file, a folder, several of them as a list or with commas between, or a set and its part, such as
            "wikitext-2:train".

    Raises:
        ValueError: if nothing is named, or there is no such set or part, or it is of pairs.
        OSError: if a file is missing, naming the nearest; or a set, saying how to get it.
    """
    listed = [spec] if isinstance(spec, str) else list(spec)
    given = [name for one in listed for name in ([one] if Path(one).exists() else one.split(","))]
    if not given or not all(given):
        raise ValueError(f"expected a text file, a folder or a set and its part, wikitext-2:train, say, not {spec!r}")
    return tuple(map(_text_path, given))


def _text_path(name: str) -> Path:
    if Path(name).is_dir():
        return Path(name)
    found = None if Path(name).exists() else set_part(name)
    return found[0].text(found[1]) if found else existing(name)


def set_part(spec: str) -> tuple[NamedSet, str] | None:
    """The set and the part that a text such as "multi30k:train" names; None if it reads like files."""
    name, colon, part = spec.partition(":")
    if name in SETS or (colon and "," not in part and os.sep not in spec):
        return named(name), part
    return None


@dataclass(frozen=True)
class SetFile:
    """A file of a named set. It may stand gzipped, with ``.gz`` added to its name.

    Attributes:
        path: below the folder of the set.
        size, sha256: of the file as it was published.
        url: where; empty if it cannot be downloaded.
    """

    path: str
    size: int
    sha256: str
    url: str = ""

    def below(self, root: Path) -> Path | None:
        """Where the file stands below this folder, if it does."""
        return next((path for end in ("", ".gz") if (path := root / (self.path + end)).is_file()), None)


@dataclass(frozen=True)
class NamedSet:
    """A corpus with a name.

    Attributes:
        name, title: for the shell and for people.
        folder: below WEFT_DATA or the cache; empty for what comes with weft.
        pattern: of its paths, with {part} and with {language} (a file for each) or {pair} (a TSV for both); with {part}
            alone if it has one language.
        languages: that it has.
        parts: name -> what its files call it. That is a name as well.
        files: path -> file.
        origin, licence, citation: as its makers say.
        several: see ParallelText.
    """

    name: str
    title: str
    folder: str
    pattern: str
    languages: tuple[str, ...]
    parts: Mapping[str, str]
    files: Mapping[str, SetFile]
    origin: str
    licence: str
    citation: str
    several: bool = False

    @property
    def downloadable(self) -> bool:
        """Whether ``get`` can bring it."""
        return all(file.url for file in self.files.values())

    @property
    def size(self) -> int:
        """Of all files as published, in bytes."""
        return sum(file.size for file in self.files.values())

    def home(self, files: Iterable[SetFile] | None = None) -> Path | None:
        """The first folder in which these files, or all, stand: below WEFT_DATA, then below the cache."""
        wanted = list(self.files.values() if files is None else files)
        data = os.environ.get("WEFT_DATA")
        roots = [Path(data) / self.folder] if data else []
        roots.append(self.cache)
        if not self.folder:
            roots = [Path(__file__).resolve().parent.parent / "shipped"]
        return next((root for root in roots if all(file.below(root) for file in wanted)), None)

    @property
    def cache(self) -> Path:
        """The folder that it is downloaded into."""
        return cache_folder() / "data" / self.folder

    def _pick(self, part: str, source: str, target: str) -> list[SetFile]:
        """The file of both languages in this order, or the source's and the target's; none if there is no such pair."""
        fill = {"part": self.parts.get(part, part), "pair": f"{source}-{target}"}
        paths = dict.fromkeys(self.pattern.format(language=language, **fill) for language in (source, target))
        return [self.files[path] for path in paths] if all(path in self.files for path in paths) else []

    def has(self, part: str, source: str, target: str) -> bool:
        """Whether a part has pairs of these two languages, either way.

        Raises:
            ValueError: if there is no such part.
        """
        self._check(part)
        return source != target and any(self._pick(part, *way) for way in ((source, target), (target, source)))

    def open(self, part: str, source: str = "", target: str = "") -> ParallelText:
        """A part of the set.

        Raises:
            ValueError: if there is no such part or pair, or if the languages are missing and not clear.
            OSError: if the files are not here, saying how to get them.
        """
        self._check(part)
        if len(self.languages) == 1:
            pairs = _any_of(name for name, other in SETS.items() if len(other.languages) > 1)
            raise ValueError(f"{self.name} is text in one language: expected a set of pairs, {pairs}")
        if len(self.languages) == 2:
            first, second = self.languages
            source = source or (first if target != first else second)
            target = target or (first if source != first else second)
        straight = self._pick(part, source, target)
        files = straight or self._pick(part, target, source)
        if source == target or not files:
            pairs = _any_of("-".join(pair) for pair in combinations(self.languages, 2) if self._pick(part, *pair))
            raise ValueError(
                f"{self.name} needs source and target: expected {pairs}, either way, not {source!r} and {target!r}"
            )
        columns = (0, 1) if straight else (1, 0)
        label = f"{self.name}:{part} {source}-{target}"
        return ParallelText(self._here(files), label, source, target, columns, self.several)

    def text(self, part: str) -> Path:
        """The file of a part, of a set in one language.

        Raises:
            ValueError: if there is no such part, or the set is of pairs.
            OSError: if the file is not here, saying how to get it.
        """
        self._check(part)
        if len(self.languages) > 1:
            texts = _any_of(name for name, other in SETS.items() if len(other.languages) == 1)
            raise ValueError(f"{self.name} is of pairs: expected text in one language, such as {texts}")
        [path] = self._here(self._pick(part, "", ""))
        return path

    def _check(self, part: str) -> None:
        names = [*self.parts, *self.parts.values()]
        if part not in names:
            hint = nearest(part, names)
            raise ValueError(f"{self.name} has no part {part!r}: expected {_any_of(self.parts)}{hint}")

    def _here(self, files: Sequence[SetFile]) -> tuple[Path, ...]:
        home = self.home(files)
        if home is None:
            raise FileNotFoundError(self.absent())
        return tuple(path for file in files if (path := file.below(home)))

    def absent(self) -> str:
        """What to do about a set that is not here."""
        where = f"WEFT_DATA to the folder of {self.folder}/{next(iter(self.files))}, gzipped or not"
        if self.downloadable:
            return f"{self.name} is not here: `weft data get {self.name}` downloads it; or set {where}"
        return f"{self.name} is not here and cannot be downloaded: set {where}"


def _any_of(names: Iterable[str]) -> str:
    *rest, last = names
    return f"{', '.join(rest)} or {last}" if rest else last


def named(name: str) -> NamedSet:
    """The set of this name.

    Raises:
        ValueError: if there is none, naming the nearest.
    """
    if name not in SETS:
        raise ValueError(f"no set {name!r}: expected {_any_of(SETS)}{nearest(name, SETS)}")
    return SETS[name]


def find(name: str, part: str, source: str = "", target: str = "") -> tuple[Path, ...]:
    """The files of a part of a named set: a TSV, or the source's and the target's.

    Raises:
        ValueError: if there is no such set, part or pair.
        OSError: if the files are not here, saying how to get them.
    """
    return named(name).open(part, source, target).files


def get(name: str, progress: Progress | None = None) -> Path:
    """The folder of a named set with every file of it, verified; downloaded into the cache if it is nowhere.

    Args:
        name: of the set.
        progress: called with the bytes that are there and those in all.

    Raises:
        ValueError: if there is no such set.
        OSError: if it cannot be downloaded, or a file is not the published one.
    """
    chosen = named(name)
    home = chosen.home()
    if home is None and not chosen.downloadable:
        raise FileNotFoundError(chosen.absent())
    done = 0

    def tell(here: int, _: int) -> None:
        if progress is not None:
            progress(done + here, chosen.size)

    for file in chosen.files.values():
        if home is None:
            fetch(file.url, chosen.cache / file.path, file.sha256, file.size, tell)
        elif (path := file.below(home)) and file.sha256 not in (digest(path), content_digest(path)):
            raise OSError(f"{path} is not the file of {name}: expected sha256 {file.sha256}; remove it and get another")
        tell(file.size, file.size)
        done += file.size
    return home or chosen.cache


def describe(name: str) -> dict[str, str]:
    """What there is to say of a named set, for people."""
    chosen = named(name)
    home = chosen.home()
    return {
        "name": name,
        "title": chosen.title,
        "languages": ", ".join(chosen.languages),
        "parts": ", ".join(chosen.parts),
        "size": f"{chosen.size / 1e6:.1f} MB",
        "here": str(home) if home else "no",
        "download": f"weft data get {name}" if chosen.downloadable else "none",
        "origin": chosen.origin,
        "licence": chosen.licence,
        "citation": chosen.citation,
    }


def _table(rows: str, base: str = "") -> dict[str, SetFile]:
    """Files from lines of path, size and sha256, published below a base."""
    split = (row.split() for row in rows.strip().splitlines())
    return {path: SetFile(path, int(size), sha256, base and base + path) for path, size, sha256 in split}


_MULTI30K = "https://raw.githubusercontent.com/multi30k/dataset/a3d2e0d26b56f3846f66a952536ffed4e401d05a/data/task1/"
_MULTI30K_PARTS = {
    "train": "train",
    "validation": "val",
    "test2016": "test_2016_flickr",
    "test2017": "test_2017_flickr",
    "mscoco": "test_2017_mscoco",
}
_MULTI30K_LICENCE = "no licence file; provided for non-commercial research and education"
_MULTI30K_CITATION = "Elliott et al. 2016, Multi30K (W16-3210); Elliott et al. 2017 (W17-4718): French, 2017, MSCOCO"
_TATOEBA_LICENCE = "CC BY 2.0 FR; attribution: www.manythings.org/anki and tatoeba.org"
_TATOEBA_CITATION = "the Tatoeba project, tatoeba.org; manythings.org/anki"

_CHAR_RNN = "https://raw.githubusercontent.com/karpathy/char-rnn/6f9487a6fe5b420b7ca9afb0d7c078e37c1d1b4e/"
_SHAKESPEARE = _CHAR_RNN + "data/tinyshakespeare/"
_TORCH_EXAMPLES = "https://raw.githubusercontent.com/pytorch/examples/77f55b912142e11fcfdf5b530231fb9c52f181e8/"
_WIKITEXT = _TORCH_EXAMPLES + "word_language_model/data/wikitext-2/"

_MULTI30K_TOK_FILES = """
tok/train.lc.norm.tok.en            1837696 08925f8e0572bcd5a006702fc5fe20e2d77c6917d4eebd576fc20de6693c2119
tok/train.lc.norm.tok.de            2150008 cb5a23529b65ec2061f1dc446192a9c37382b63cc75f81a0be59d34894b3a505
tok/train.lc.norm.tok.fr            2235588 8fa41bb718412bcb7c5dfa58603842810a01543eae86a51279f9886b901266e1
tok/val.lc.norm.tok.en                64608 46573ce391ae227f1c72f873392436a20ef18e0a6d518098cfbd70b77c8572ec
tok/val.lc.norm.tok.de                77273 97232bd273eceb7207f689527386a97e4be2616b18ada47576bdaf96c8ae1f00
tok/val.lc.norm.tok.fr                78242 b303e301aa21fe7822a846b2b3fb2d5a1121ec807cd5b1d006fb7b2b5507168a
tok/test_2016_flickr.lc.norm.tok.en   63307 5b7f32627cf99eced828311b955dae9800bb52bc8b91cf8b6526829e605b29d2
tok/test_2016_flickr.lc.norm.tok.de   71917 c6a33d39d48f9f510de147651316cd9d918e09ad0219df734a2f16b6baccacc4
tok/test_2016_flickr.lc.norm.tok.fr   76394 1463bd5960f9bfe098ec3cd752d3df0c49c84dc646fb518964a29232658cd836
tok/test_2017_flickr.lc.norm.tok.en   56123 c9d1dfd7a26add989382e534af235af9f0f658b2a30e7eb0efdaf142496ee54f
tok/test_2017_flickr.lc.norm.tok.de   65228 02067e4a9402786a4fcb8c1b6f4307e4a5073ced64800abead5273b54f5f31f6
tok/test_2017_flickr.lc.norm.tok.fr   69537 c0583117a47b31e8a6c6a97cfe8de153e462074668f4e994764fcc80b21d33b4
tok/test_2017_mscoco.lc.norm.tok.en   25380 fe69ae004d71c42ead0301e70c57de5b1b6b5fb7f52210d42b22801e98e656f3
tok/test_2017_mscoco.lc.norm.tok.de   30464 e2825990b8a4e5289d2cdba801d57c187810bab9b4f5d87a30c35800a0d871b6
tok/test_2017_mscoco.lc.norm.tok.fr   31725 0b6a4620f02b6b9acf7811fda23f90fed9c6baa0b96aa224db50a273078c84d1
"""
_MULTI30K_RAW_FILES = """
raw/train.en.gz            568929 d79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f
raw/train.de.gz            637044 726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6
raw/train.fr.gz            604242 622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c
raw/val.en.gz               21650 14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28
raw/val.de.gz               24681 f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a
raw/val.fr.gz               23001 ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9
raw/test_2016_flickr.en.gz  21077 611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9
raw/test_2016_flickr.de.gz  22890 9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8
raw/test_2016_flickr.fr.gz  22310 6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90
raw/test_2017_flickr.en.gz  19138 76a444ee25172e72695cddb13ae4a3bda59430617be88e0bb46b60504f054074
raw/test_2017_flickr.de.gz  21471 a2c89666db00c495cd8513b9d708d5a3acc205d7de312ef2bf5fb7ebc1540aee
raw/test_2017_flickr.fr.gz  20434 3ba671ceb2299f3304ffafefea7a833d08632fbaf0ba18546f8a2ec2391af496
raw/test_2017_mscoco.en.gz   8844 aab300bfb4427697987e02cd0aacd44bfe8aa50456231b6474c08038bbed2b58
raw/test_2017_mscoco.de.gz  10230 799e4854c25d601cb6cb6be29eabe5667734c61ace2f495e03e429031a0bc338
raw/test_2017_mscoco.fr.gz   9751 754f3072ba9f124569ba5258b32730fc1d214bbf8e0c6dfb2b74401676220db0
"""
_TATOEBA_FILES = """
en-de/train.tsv 12107966 a0a30e7d2fcf82d41b017933631e660d368ddf6a1c03c89b4b0a3591fc10b58e
en-de/val.tsv      60236 0c327cff1233ca55210c2ec20955400c370e2a2413671f2e0485ed85221dd86f
en-de/test.tsv     62382 aa812526de183df2e40dd354b128510dcd9b133e6ec55d49217b6194dbfe3d75
en-es/train.tsv  7907114 c2ab6aa6d425e91237203c0efe75facba8f97751de11184d5add59ea342bcd64
en-es/val.tsv      41224 1701938ad373fd0393c907fdb1390ccf1d47f8aafed4ec43d0ab603bf02384d4
en-es/test.tsv     38972 4b4ba39261fcc678c2deb3cd12f0ddff8c70003e84e38edcb23f693a92a8da92
en-fr/train.tsv 11475835 751036488c14beb41bd302f1e9d89cb108d372ee4877642090f5a7cf9c89fd4f
en-fr/val.tsv      62036 5727d2b8a2447f42e6ffea442be62148c8224e6c478ca83f2169bee5f6c5fa0b
en-fr/test.tsv     57689 69f1e462b1a340e544b50071f77eedbe3fb9f69590689eba49e29d065ca078b3
"""
_SAMPLE_FILES = """
tatoeba-en-es/train.tsv      1361128 c75ea74b4c97c5300177398da5f0702fd906a5c4acd80f96ba44f7c1cc83f643
tatoeba-en-es/validation.tsv   41224 1701938ad373fd0393c907fdb1390ccf1d47f8aafed4ec43d0ab603bf02384d4
tatoeba-en-es/test.tsv         38972 4b4ba39261fcc678c2deb3cd12f0ddff8c70003e84e38edcb23f693a92a8da92
"""
_SHAKESPEARE_FILES = """
input.txt 1115394 86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed
"""
_WIKITEXT_TRAIN = """
train.shuffled_articles.txt 10797148 728c77e87e176af4730f9a80fc6008bcaff421a7202c1c048877c0eec3685f89
"""
_WIKITEXT_FILES = """
valid.txt 1121681 f0737ed31fc1329026e95cb8b98e19c2a182c39c240ab909dc31abf2f8af58e8
test.txt  1256449 d790b833ef8cf03a90db7bf1271b7520b83c45ce07ba3c1a9699df81e239eca0
"""

_ALL = (
    NamedSet(
        name="multi30k",
        title="captions of photographs, lower-cased and tokenised (Moses)",
        folder="multi30k",
        pattern="tok/{part}.lc.norm.tok.{language}",
        languages=("en", "de", "fr"),
        parts=_MULTI30K_PARTS,
        files=_table(_MULTI30K_TOK_FILES, _MULTI30K),
        origin=_MULTI30K + "tok",
        licence=_MULTI30K_LICENCE,
        citation=_MULTI30K_CITATION,
    ),
    NamedSet(
        name="multi30k-raw",
        title="captions of photographs, as they were written",
        folder="multi30k",
        pattern="raw/{part}.{language}.gz",
        languages=("en", "de", "fr"),
        parts=_MULTI30K_PARTS,
        files=_table(_MULTI30K_RAW_FILES, _MULTI30K),
        origin=_MULTI30K + "raw",
        licence=_MULTI30K_LICENCE,
        citation=_MULTI30K_CITATION,
    ),
    NamedSet(
        name="tatoeba",
        title="everyday sentences, split so that no sentence of validation or test is in train",
        folder="tatoeba",
        pattern="{pair}/{part}.tsv",
        languages=("en", "de", "es", "fr"),
        parts={"train": "train", "validation": "val", "test": "test"},
        files=_table(_TATOEBA_FILES),  # the split was made for weft and is published nowhere
        origin="deu-eng, spa-eng and fra-eng of manythings.org/anki, 2018 and 2019, split for weft",
        licence=_TATOEBA_LICENCE,
        citation=_TATOEBA_CITATION,
        several=True,
    ),
    NamedSet(
        name="tatoeba-sample",
        title="20,000 pairs of tatoeba en-es with its validation and test parts; comes with weft",
        folder="",
        pattern="tatoeba-{pair}/{part}.tsv",
        languages=("en", "es"),
        parts={"train": "train", "validation": "validation", "test": "test"},
        files=_table(_SAMPLE_FILES),
        origin="spa-eng of manythings.org/anki, 2018, split and sampled for weft",
        licence=_TATOEBA_LICENCE,
        citation=_TATOEBA_CITATION,
        several=True,
    ),
    NamedSet(
        name="tinyshakespeare",
        title="a million characters of Shakespeare's plays; customarily the last tenth is for validation",
        folder="tinyshakespeare",
        pattern="{part}.txt",
        languages=("en",),
        parts={"all": "input"},
        files=_table(_SHAKESPEARE_FILES, _SHAKESPEARE),
        origin=_SHAKESPEARE,
        licence="the plays are in the public domain; the repository says MIT",
        citation="Karpathy 2015, The Unreasonable Effectiveness of Recurrent Neural Networks",
    ),
    NamedSet(
        name="wikitext-2",
        title="articles of Wikipedia, tokenised, rare words as <unk>; those of train in another order than published",
        folder="wikitext-2",
        pattern="{part}.txt",
        languages=("en",),
        parts={"train": "train.shuffled_articles", "validation": "valid", "test": "test"},
        # train has the lines of the official file, but is published in this order nowhere
        files=_table(_WIKITEXT_TRAIN) | _table(_WIKITEXT_FILES, _WIKITEXT),
        origin=_WIKITEXT,
        licence="CC BY-SA, as Wikipedia's",
        citation="Merity et al. 2016, Pointer Sentinel Mixture Models",
    ),
)
SETS: dict[str, NamedSet] = {chosen.name: chosen for chosen in _ALL}
