"""The structures of the headers beside this file, as ctypes has them: name for name, in the same order."""

from __future__ import annotations

import ctypes


class Matrix(ctypes.Structure):
    _fields_ = [
        ("panels", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("inputs", ctypes.c_int32),
        ("outputs", ctypes.c_int32),
        ("kind", ctypes.c_int32),
    ]


class Norm(ctypes.Structure):
    _fields_ = [
        ("weight", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("kind", ctypes.c_int32),
    ]


class Block(ctypes.Structure):
    _fields_ = [
        *((name, Norm) for name in ("attention_norm", "cross_norm", "feed_norm")),
        *((name, Matrix) for name in ("attention_in", "attention_out", "cross_query", "cross_memory", "cross_out")),
        *((name, Matrix) for name in ("inner", "gate", "outer")),
    ]


class Model(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int32) for name in ("dim", "heads", "kv_heads", "head_dim", "norm_first", "activation")),
        *((name, ctypes.c_int32) for name in ("encoder_layers", "decoder_layers")),
        ("scale", ctypes.c_float),
        ("encoder", ctypes.POINTER(Block)),
        ("decoder", ctypes.POINTER(Block)),
        ("encoder_norm", Norm),
        ("decoder_norm", Norm),
        *((name, Matrix) for name in ("source", "target", "output")),
        *((name, ctypes.c_void_p) for name in ("source_places", "target_places", "source_turns", "target_turns")),
    ]


class Step(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "lengths", "memory", "slots", "store")),
        ("all_slots", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("width", "count")),
    ]


class Wanted(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("length_penalty", "finished")),
        *((name, ctypes.c_void_p) for name in ("never", "ends")),
        *((name, ctypes.c_int32) for name in ("nevers", "count_ends", "beam", "n_best", "min_len", "greedy")),
    ]


class Sources(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("tokens", "starts", "limits", "first")),
        *((name, ctypes.c_int32) for name in ("count", "room")),
    ]


class Found(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("tokens", "gained", "score", "log_prob", "length", "finished")]


class Heads(ctypes.Structure):
    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_int64) for name in ("row", "head", "token"))]


class Attention(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "heads", "groups", "queries", "keys", "dim")),
        *((name, ctypes.c_int32) for name in ("causal", "narrow", "bound")),
        *((name, ctypes.c_float) for name in ("scale", "kept")),
        ("key", ctypes.c_uint64),
        ("lengths", ctypes.c_void_p),
        *((name, Heads) for name in ("q", "k", "v", "out", "dq", "dk", "dv")),
    ]


class Norming(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "weight", "bias", "spreads")),
        *((name, ctypes.c_int64) for name in ("rows", "n")),
        ("eps", ctypes.c_float),
        *((name, ctypes.c_int32) for name in ("centred", "narrow")),
    ]


class Drop(ctypes.Structure):
    _fields_ = [
        ("key", ctypes.c_uint64),
        ("count", ctypes.c_int64),
        ("bound", ctypes.c_int32),
        ("kept", ctypes.c_float),
    ]


class Joined(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p * 3) for name in ("weight", "bias")),
        ("outs", ctypes.c_int64 * 3),
        ("inputs", ctypes.c_int64),
    ]


class Sublayer(ctypes.Structure):
    _fields_ = [
        ("norm", Norming),
        *((name, Joined) for name in ("first", "last")),
        ("attention", Attention),
        ("drop", Drop),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        ("length", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("activation", "pairs")),
        *((name, ctypes.c_void_p) for name in ("between", "inside", "y", "grad", "dx", "gradients")),
    ]


class Output(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "dim", "words")),
        ("x", ctypes.c_void_p * 2),
        *((name, ctypes.c_void_p) for name in ("weight", "targets")),
        *((name, ctypes.c_float) for name in ("smoothing", "apart")),
        ("narrow", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("costs", "divergences")),
        ("dx", ctypes.c_void_p * 2),
        ("dweight", ctypes.c_void_p),
    ]


class Embedding(ctypes.Structure):
    _fields_ = [
        ("numbers", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("count", "words", "dim")),
        *((name, ctypes.c_void_p) for name in ("table", "added")),
        ("period", ctypes.c_int64),
    ]


class Additive(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_int64) for name in ("rows", "keys", "dim", "width")),
        *((name, ctypes.c_void_p) for name in ("k", "v", "energy", "lengths")),
    ]


class Look(ctypes.Structure):
    _fields_ = [(name, ctypes.c_void_p) for name in ("q", "weights", "out", "slopes", "dq")]


class AdamW(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_float) for name in ("by", "rate", "beta1", "beta2", "eps")),
        *((name, ctypes.c_double) for name in ("rest1", "rest2")),
    ]
