"""One way to compile: no GIL, no request-time surprises, and machine code kept between starts.

Arrays go in as addresses, and from function to function as one array of addresses. numba passes an array by
value, as seven words, and counts references at every use of a tuple's member: with 25 arrays that took four
times as long as the work itself. Whoever passes an address keeps the array alive.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import numpy.typing as npt
from numba import types
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from gateway.tokenization.kernels.arrays import Bytes, Int64, UInt8
from gateway.tokenization.kernels.kept import FOLDER, KeptCode

Function = TypeVar("Function", bound=Callable[..., Any])


numba.config.LOOP_VECTORIZE = 0  # a sixth of the time to compile, and nothing here gains by it


def entry(function: Function) -> Function:
    """`function` as machine code that runs without the GIL, made or loaded when it is first called."""
    made: Any = numba.njit(nogil=True)(function)
    if FOLDER is not None:
        module = function.__module__.rpartition(".")[2]
        made._cache = KeptCode(FOLDER, f"{module}.{function.__name__}")
    return cast(Function, made)


def entry_of(called: Callable[..., Any]) -> Callable[[Function], Function]:
    """`entry` for a closure over `called`, in whose module it is kept as `encode`; see inner_of."""

    def named(function: Function) -> Function:
        function.__module__, function.__name__ = called.__module__, "encode"
        function.__qualname__ += f".{called.__module__}.{called.__qualname__}"
        return entry(function)

    return named


def called_directly(function: Function, *arguments: object) -> Function:
    """An `entry` for arguments of these types, by whose looks numba would choose at each call, in 0.2 us."""
    dispatcher: Any = function
    kinds = tuple(map(numba.typeof, arguments))
    dispatcher.compile(kinds)
    return cast(Function, dispatcher.overloads[kinds].entry_point)


def inner(function: Function) -> Function:
    """`function` as machine code that only compiled functions call: it takes half as long to make."""
    made: Function = numba.njit(nogil=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)(function)
    return made


def inner_of(called: Callable[..., Any]) -> Callable[[Function], Function]:
    """`inner` for a closure over `called`, whose name becomes part of the closure's.

    numba tells functions of one name apart by a number that counts within a process. Code that another
    process kept and code made here can so have the same symbol, and the linker takes the one that it knows
    for both: a kernel would run another's closure on its own memory.
    """

    def named(function: Function) -> Function:
        function.__qualname__ += f".{called.__module__}.{called.__qualname__}"
        return inner(function)

    return named


@intrinsic  # type: ignore[untyped-decorator]
def _pointer(_: Any, address: Any, dtype: Any) -> Any:
    signature = types.CPointer(dtype.dtype)(address, dtype)

    def generate(context: Any, builder: Any, made: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(made.return_type))

    return signature, generate


@intrinsic  # type: ignore[untyped-decorator]
def _load(_: Any, address: Any, dtype: Any) -> Any:
    signature = types.uint64(address, dtype)

    def generate(context: Any, builder: Any, made: Any, args: Any) -> Any:
        of = context.get_value_type(dtype.dtype)
        place = builder.inttoptr(args[0], of.as_pointer())
        return builder.zext(builder.load(place, align=1), context.get_value_type(types.uint64))

    return signature, generate


# The number of an unsigned type at an address of any alignment.
load: Callable[[int, Any], np.uint64] = _load


@intrinsic  # type: ignore[untyped-decorator]
def _address_of(_: Any, text: Any) -> Any:
    def generate(context: Any, builder: Any, made: Any, args: Any) -> Any:
        data = context.make_array(text)(context, builder, args[0]).data
        return builder.ptrtoint(data, context.get_value_type(types.int64))

    return types.int64(text), generate


@inner
def bytes_of(text: bytes) -> Bytes:
    """A view of a bytes object."""
    return bytes_at(_address_of(text), len(text))


@inner
def numbers_at(address: int, length: int) -> Int64:
    """The i64[length] at an address."""
    found: Int64 = numba.carray(_pointer(address, np.int64), length)
    return found


@inner
def bytes_at(address: int, length: int) -> UInt8:
    """The bytes at an address."""
    found: UInt8 = numba.carray(_pointer(address, np.uint8), length)
    return found


@intrinsic  # type: ignore[untyped-decorator]
def _array_at(_: Any, addresses: Any, index: Any, dtype: Any) -> Any:
    array = types.Array(dtype.dtype, 1, "C")

    def generate(context: Any, builder: Any, made: Any, args: Any) -> Any:
        pairs = context.make_array(addresses)(context, builder, args[0]).data
        place = builder.shl(args[1], context.get_constant(types.int64, 1))
        address = builder.load(builder.gep(pairs, [place]))
        length = builder.load(builder.gep(pairs, [builder.add(place, context.get_constant(types.int64, 1))]))
        view, item = context.make_array(array)(context, builder), context.get_data_type(array.dtype)
        size = context.get_constant(types.intp, context.get_abi_sizeof(item))
        data = builder.inttoptr(address, item.as_pointer())
        populate_array(view, data=data, shape=[length], strides=[size], itemsize=size, meminfo=None)
        return view._getvalue()

    return array(addresses, types.int64, dtype), generate


# The array number `index` of `addresses_of`, whose type is `dtype`. As a function it would be made anew for
# each number, which took a tenth of the time to compile.
array_at: Callable[[Int64, int, Any], Any] = _array_at


def addresses_of(arrays: Iterable[npt.NDArray[Any]]) -> Int64:
    """Address and length of each array, i64[2 n]. They must outlive the use of these."""
    pairs = [number for array in arrays for number in (array.ctypes.data, len(array))]
    return np.array(pairs, np.int64)
