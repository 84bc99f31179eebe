"""The Transformer with its source and its step as one compiled call each; see kernels/native.

``compiled(model)`` gives what a search calls in the model's place, by the same contract: ``start``, ``step``,
``logits``, and ``best`` for those who want the most probable tokens and not all logits. The arithmetic is fp32 with
parameters as they are (fp32, bf16 or int8), within rounding of the model's own. A row has the same bits in
any company, whoever asks for it or not.

What it does not know runs in torch: other families, positions that are a bias on the scores, normalised queries, bf16
activations; and everything while somebody records.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from weft import observe
from weft.config import PAD, Specials
from weft.kernels import native
from weft.kernels.native.structures import Block, Found, Matrix, Model, Norm, Sources, Step, Wanted
from weft.kernels.plain import is_plain
from weft.layers.blocks import DecoderBlock, EncoderBlock
from weft.layers.linear import Linear
from weft.models.encoder_decoder import read_source
from weft.models.slots import CompiledState, Memory, Slots
from weft.models.transformer import Transformer

_KNOWN = ("sinusoidal", "learned", "order", "none", "rotary")  # positions that are a table of numbers, or nothing
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_COARSE = 3  # int8 times inputs of 7 bits
_ACTIVATIONS = ("relu", "gelu", "gelu_tanh", "swiglu")
NO_NUMBERS = "the model's logits are not finite numbers: its parameters may be damaged"
SLOTS = 8  # that a state begins with, for each row


class Result(NamedTuple):
    """A hypothesis that a search found; see weft.decoding.options.Hypothesis. Greedy ones have no score yet."""

    tokens: list[int]
    gained: list[float]
    score: float
    log_prob: float
    finished: bool


class _Interrupt:
    """Lets Python's signal handlers run while C++ works, and keeps what they raise."""

    def __init__(self) -> None:
        self.raised: BaseException | None = None
        asking = self._asking()
        next(asking)
        self.asked = ctypes.CFUNCTYPE(ctypes.c_int32)(asking.__next__)

    def _asking(self) -> Iterator[int]:
        """Whether something was raised. Python looks for signals where a function begins and a loop goes round: both
        are inside the try.
        """
        try:
            while True:
                yield 0
        except GeneratorExit:
            return
        except BaseException as raised:
            self.raised = raised
        yield 1


@dataclass(eq=False)
class _Made:
    """What was compiled of a model, from which parameters, and where to look for these."""

    places: list[dict[str, Any]]
    found: tuple[list[int], int]
    runner: Compiled

    @classmethod
    def of(cls, model: Transformer, library: ctypes.CDLL) -> _Made:
        """Compile a model as it is now."""
        parts = [(part._modules, part._parameters, part._buffers) for part in model.modules()]
        places = [place for part in parts for place in part if place]
        return cls(places, _fingerprint(places, library), Compiled(model, library))


_made: WeakKeyDictionary[nn.Module, _Made] = WeakKeyDictionary()


def compiled(model: object) -> Compiled | None:
    """What a search calls in the place of this model; None if it must call the model itself."""
    if not isinstance(model, Transformer) or observe.listening() or is_plain() or not _is_known(model):
        return None
    library = native.library()
    if library is None:
        return None
    made = _made.get(model)
    if made is None or made.found != _fingerprint(made.places, library):  # nothing yet, or it was trained on
        made = _made[model] = _Made.of(model, library)
    made.runner.specials = model.specials
    return made.runner


def _fingerprint(places: list[dict[str, Any]], library: ctypes.CDLL) -> tuple[list[int], int]:
    """Which modules there are, where each parameter is and how often it was changed; and a hash of some of the numbers.

    The hash is for changes that torch does not count: those of its fused optimisers, and whatever goes by ``.data``.
    """
    parts = [part for place in places for part in place.values() if part is not None]
    tensors = [part for part in parts if isinstance(part, Tensor)]
    addresses = [tensor.data_ptr() for tensor in tensors]
    words = [tensor.numel() * tensor.element_size() // 4 for tensor in tensors]
    count = len(tensors)
    looked = library.weft_sample((ctypes.c_void_p * count)(*addresses), (ctypes.c_int64 * count)(*words), count)
    return [*map(id, parts), *addresses, *(tensor._version for tensor in tensors)], looked


def is_compiled(model: object) -> bool:
    """Whether ``compiled`` gives something for this model, whatever its parameters are stored as."""
    return isinstance(model, Transformer) and _is_known(model) and native.library() is not None


def _is_known(model: Transformer) -> bool:
    """Whether transformer.cpp can do what this model does."""
    config, table = model.config, model.target_embedding
    return (
        table is not None
        and config.positions in _KNOWN
        and not config.qk_norm
        and model.precision == torch.float32
        and table.dtype in _KINDS
        and table.device.type in ("cpu", "meta")
    )


class Compiled:
    """A Transformer as a search sees it: ``start``, ``step``, ``logits`` and ``best`` of weft.models.contract.

    Layers in int8 round their inputs to 16 bits, and those of at least ``coarse_from`` inputs to 7: there products are
    nearly all of the time, and 7 bits take two thirds of it.
    """

    coarse_from = 512

    def __init__(self, model: Transformer, library: ctypes.CDLL) -> None:
        """Pack the parameters."""
        self._library, self._kept = library, list[Any]()
        self._positions = {"source": model.source_positions, "target": model.target_positions}
        self.max_len = model.max_len
        self.specials: Specials = model.specials
        self.cross_attentions = model.cross_attentions
        panel: int = library.weft_panel()
        self._panel = panel
        attention = model._decoder_blocks[0].attention
        self._width = attention.num_kv_heads * attention.head_dim
        target = self._table(model, "target_embedding")
        source = target if model.source_embedding is None else self._table(model, "source_embedding")
        output = target if model.output_weight is None else self._table(model, "output_weight")
        if model.output_bias is not None:
            output = Matrix.from_buffer_copy(output)
            output.bias = self._address(model.output_bias)
        encoder = [self._block(block) for block in model.encoder]
        decoder = [self._block(block) for block in model.decoder]
        self._c = Model(
            dim=model.config.dim,
            heads=attention.num_heads,
            kv_heads=attention.num_kv_heads,
            head_dim=attention.head_dim,
            norm_first=model._decoder_blocks[0].around_attention.norm_first,
            activation=_ACTIVATIONS.index(model.config.activation),
            encoder_layers=len(encoder),
            decoder_layers=len(decoder),
            scale=model.scale,
            encoder=(Block * len(encoder))(*encoder),
            decoder=(Block * len(decoder))(*decoder),
            encoder_norm=self._norm(model.encoder_norm),
            decoder_norm=self._norm(model.decoder_norm),
            source=source,
            target=target,
            output=output,
        )
        self._places: dict[str, Tensor] = {}

    @property
    def vocab_size(self) -> int:
        """How many target words there are."""
        return int(self._c.output.outputs)

    def start(self, inputs: Tensor) -> CompiledState:
        """The state before the first target token, from source tokens [B, N].

        Raises:
            ValueError: if a padding token stands before a real one, or a number is not in the vocabulary.
        """
        tokens, starts = self._sources(inputs)
        entries = torch.empty(self._c.decoder_layers, len(tokens), 2 * self._width)
        told = self._told(source=inputs.shape[1])
        self._library.weft_encode(
            ctypes.byref(told), _at(tokens), _at(starts), len(inputs), _at(entries), torch.get_num_threads()
        )
        rows = torch.arange(len(inputs))
        slots = Slots(self._c.decoder_layers, SLOTS * len(inputs), 2 * self._width)
        none = torch.zeros(len(inputs), 0, dtype=torch.int32)
        return CompiledState(Memory(entries, starts), rows, slots, none, torch.zeros_like(rows))

    def first(self, inputs: Tensor) -> Tensor:
        """[B] BOS."""
        return inputs.new_full((len(inputs),), self.specials.bos)

    def room(self, inputs: Tensor) -> Tensor | None:
        """[B] how many tokens there is room for behind BOS; None for any number."""
        return None if self.max_len is None else inputs.new_full((len(inputs),), self.max_len - 1)

    def step(self, tokens: Tensor, state: CompiledState) -> tuple[Tensor, CompiledState]:
        """Consume tokens [B, T], T ≥ 1: hidden [B, T, D] and the state after them."""
        _check(tokens, self._c.target.outputs, "target")
        (rows, count), tokens = tokens.shape, tokens.contiguous()
        after = state.grown(count)
        hidden = torch.empty(rows, count, self._c.dim)
        told = self._told(target=after.table.shape[1])
        before, memory, table = after.lengths - count, after.memory, after.table
        step = Step(
            *(_at(tokens), _at(before), None, _at(table), _at(after.slots.entries)),
            *(after.slots.count, table.shape[1], count),
        )
        self._library.weft_step(
            *(ctypes.byref(told), ctypes.byref(step), _at(memory.entries), _at(after.sentence), _at(memory.starts)),
            *(ctypes.c_int64(memory.entries.shape[1]), rows, _at(hidden), torch.get_num_threads()),
        )
        return hidden, after

    def logits(self, hidden: Tensor) -> Tensor:
        """Scores of the next token [..., V] in fp32, of hidden [..., D]."""
        hidden = hidden.contiguous()
        scores = torch.empty(*hidden.shape[:-1], self._c.output.outputs)
        self._library.weft_linear(
            _at(hidden),
            hidden.numel() // hidden.shape[-1],
            ctypes.byref(self._c.output),
            _at(scores),
            torch.get_num_threads(),
        )
        return scores

    def log_probs(self, hidden: Tensor) -> Tensor:
        """log p of the next token [R, V], of hidden [R, D]: bit for bit what ``best`` and ``search`` give."""
        scores = self.logits(hidden)
        self._library.weft_normalise(
            _at(scores), len(scores), ctypes.c_int64(scores.shape[-1]), torch.get_num_threads()
        )
        return scores

    def best(self, hidden: Tensor, k: int, never: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The k most probable next tokens of hidden [R, D], but for those never chosen: log p [R, k] and numbers.

        The most probable first; of equals the lowest number. −∞ where there are not as many. Where the logits are no
        numbers, neither is log p.
        """
        hidden, rows = hidden.contiguous(), len(hidden)
        values, tokens = torch.empty(rows, k), torch.empty(rows, k, dtype=torch.int64)
        closed = (ctypes.c_int64 * len(never))(*never)
        self._library.weft_best(
            *(ctypes.byref(self._c), _at(hidden), rows, k, closed, len(never)),
            *(_at(values), _at(tokens), torch.get_num_threads()),
        )
        return values, tokens

    def search(
        self,
        inputs: Tensor,
        limits: Tensor,
        never: Sequence[int],
        beam: int | None,
        n_best: int = 1,
        length_penalty: float = 1.0,
        finished: float = 1.0,
        min_len: int = 0,
    ) -> list[list[Result]]:
        """What weft.decoding's greedy search (beam None) or beam finds, where its rules depend on no row's past.

        Args:
            inputs: [B, N] sources.
            limits: [B] how many tokens a target has at most.
            never: tokens that are never chosen.
            beam, n_best, length_penalty, min_len: as in SearchOptions.
            finished: so many finished hypotheses of a source are enough.

        Returns:
            For each source up to n_best results, best first.

        Raises:
            ValueError: if the logits are no numbers, or the inputs are not as ``start`` wants them.
        """
        tokens, starts = self._sources(inputs)
        order = (starts[1:] - starts[:-1]).argsort(descending=True, stable=True)
        if not bool((order[1:] > order[:-1]).all()):  # of like lengths, so that a thread's rows end at about one time
            back = order.argsort()
            found = self.search(inputs[order], limits[order], never, beam, n_best, length_penalty, finished, min_len)
            return [found[place] for place in back.tolist()]
        count, room = len(inputs), int(limits.max()) + 1 if len(limits) else 0
        told = self._told(source=inputs.shape[1], target=room)
        closed, ends = (torch.tensor(list(numbers), dtype=torch.int64) for numbers in (never, self.specials.ends))
        wanted = Wanted(
            *(length_penalty, finished, _at(closed), _at(ends), len(closed), len(ends)),
            *(beam or 1, n_best, min_len, beam is None),
        )
        limits, first = limits.contiguous(), self.first(inputs).contiguous()
        sources = Sources(_at(tokens), _at(starts), _at(limits), _at(first), count, room)
        said = torch.empty(count, n_best, room, dtype=torch.int64), torch.empty(count, n_best, room)
        score, log_prob = torch.empty(2, count, n_best, dtype=torch.float64)
        length, complete = torch.empty(2, count, n_best, dtype=torch.int32)
        stop = _Interrupt()
        outcome = self._library.weft_search(
            *(ctypes.byref(told), ctypes.byref(wanted), ctypes.byref(sources)),
            ctypes.byref(Found(*(_at(each) for each in (*said, score, log_prob, length, complete)))),
            *(stop.asked, torch.get_num_threads()),
        )
        if stop.raised is not None:
            raise stop.raised
        if outcome == 3:
            raise MemoryError("there is not enough memory for this search: try a smaller beam or fewer sources")
        if outcome:
            raise ValueError(NO_NUMBERS)
        lists = [part.tolist() for part in (score, log_prob, length, complete)]
        return [
            [
                Result(
                    said[0][row, n, :end].tolist(),
                    said[1][row, n, : end + whole].tolist(),
                    each_score,
                    each_log_prob,
                    bool(whole),
                )
                for n, (each_score, each_log_prob, end, whole) in enumerate(zip(*parts, strict=True))
                if end >= 0
            ]
            for row, parts in enumerate(zip(*lists, strict=True))
        ]

    def _sources(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """The tokens of all sources [B, N] one behind the other, and where each begins [B + 1]."""
        lengths = read_source(inputs).lengths if len(inputs) else inputs.new_zeros(0)
        tokens = inputs[inputs != PAD]
        _check(tokens, self._c.source.outputs, "source")
        return tokens, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])

    def _told(self, **places: int) -> Model:
        """The model, for one call, with so many places of each side; another thread may ask for others meanwhile."""
        told = Model.from_buffer_copy(self._c)
        for side, count in places.items():
            positions = self._positions[side]
            if positions.scheme is not None:
                setattr(told, f"{side}_places", self._place(side, count, positions.table))
            elif positions.rotary is not None:
                setattr(told, f"{side}_turns", self._place(side, count, positions.turns))
        return told

    def _place(self, side: str, count: int, make: Callable[[int], Tensor]) -> int:
        """The address of what is made for each of ``count`` places: added to embeddings, or to turn by."""
        table = self._places.get(side)
        if table is None or len(table) < count:
            limit = self.max_len
            if limit is not None and count > limit:
                raise ValueError(f"the model has {limit} positions, but {count} are needed")
            count = 2 * count if limit is None else min(2 * count, limit)
            table = self._places[side] = make(count).detach()
            self._kept.append(table)  # another thread may be in a search with a smaller one
        return table.data_ptr()

    def _table(self, model: Transformer, name: str) -> Matrix:
        return self._matrix([(getattr(model, name), getattr(model, f"{name}_scale"), None)])

    def _block(self, block: nn.Module) -> Block:
        assert isinstance(block, EncoderBlock | DecoderBlock)
        own, feed = block.attention, block.feed_forward
        made = {
            "attention_norm": self._norm(block.around_attention.norm),
            "attention_in": self._linear(own.query, own.key, own.value),
            "attention_out": self._linear(own.output),
            "feed_norm": self._norm(block.around_feed_forward.norm),
            "inner": self._linear(feed.inner),
            "outer": self._linear(feed.outer),
        }
        if feed.gate is not None:
            made["gate"] = self._linear(feed.gate)
        if isinstance(block, DecoderBlock):
            cross = block.cross_attention
            made["cross_norm"] = self._norm(block.around_cross_attention.norm)
            made["cross_query"] = self._linear(cross.query)
            made["cross_memory"] = self._linear(cross.key, cross.value)
            made["cross_out"] = self._linear(cross.output)
        return Block(**made)

    def _linear(self, *layers: Linear) -> Matrix:
        return self._matrix([(layer.weight, layer.weight_scale, layer.bias) for layer in layers])

    def _matrix(self, parts: Sequence[tuple[Tensor, Tensor | None, Tensor | None]]) -> Matrix:
        """Linear layers of one input, each a weight, its scales and a bias, as one, packed."""
        weight = torch.cat([weight.detach() for weight, _, _ in parts])
        scales = [scale for _, scale, _ in parts if scale is not None]
        biases = [bias.detach() for _, _, bias in parts if bias is not None]
        (outputs, inputs), kind = weight.shape, _KINDS[weight.dtype]
        if weight.dtype == torch.int8 and self.coarse_from <= inputs < 1 << 17:  # more would not fit sums of 32 bits
            kind = _COARSE
        panels = weight.new_empty(-(-outputs // self._panel) * self._panel, -(-inputs // 8) * 8)
        self._library.weft_pack(_at(weight), _at(panels), ctypes.c_int64(outputs), ctypes.c_int64(inputs), kind)
        return Matrix(
            panels=self._address(panels),
            scale=self._address(torch.cat(scales)) if scales else None,
            bias=self._address(torch.cat(biases).float()) if biases else None,
            inputs=inputs,
            outputs=outputs,
            kind=kind,
        )

    def _norm(self, norm: nn.Module) -> Norm:
        if isinstance(norm, nn.Identity):
            return Norm(kind=0)
        assert isinstance(norm, nn.LayerNorm | nn.RMSNorm)
        bias = getattr(norm, "bias", None)
        return Norm(
            weight=self._address(norm.weight.float()),
            bias=None if bias is None else self._address(bias.float()),
            eps=norm.eps,
            kind=1 if isinstance(norm, nn.LayerNorm) else 2,
        )

    def _address(self, tensor: Tensor) -> int:
        """Of a copy or of itself, which stays where it is as long as this does."""
        kept = tensor.detach().contiguous()
        self._kept.append(kept)
        return kept.data_ptr()


def _at(tensor: Tensor) -> int | ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _check(tokens: Tensor, count: int, what: str) -> None:
    """Raise IndexError unless all tokens are in a vocabulary of so many words: C++ would read beyond its end."""
    if tokens.numel():
        low, high = (int(end) for end in tokens.aminmax())
        if low < 0 or high >= count:
            raise IndexError(f"token {low if low < 0 else high} is not in the {what} vocabulary of {count}")
