"""What a straight-line body is made of on the GPU: registers with Python's operators, arrays, and operations that LLVM and PTX have."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from llvmlite import ir

from .inline import emit, llvm_f32, llvm_i32

_I8, _I16, _I64, _F64 = ir.IntType(8), ir.IntType(16), ir.IntType(64), ir.DoubleType()
_FLOATS = {"float32": llvm_f32, "float64": _F64}


def _size(kind):
    return {llvm_f32: 4, _F64: 8}.get(kind) or kind.width // 8


def _binary(integer, floating=None, swapped=False):
    def operate(self, other):
        other = self._like(other)
        a, b = (other, self.value) if swapped else (self.value, other)
        return Register(self.builder, getattr(self.builder, integer if self.is_integer else floating)(a, b))

    return operate


def _relation(symbol):
    def compare(self, other):
        floating = self.builder.fcmp_unordered if symbol == "!=" else self.builder.fcmp_ordered
        compare = self.builder.icmp_signed if self.is_integer else floating
        return Register(self.builder, compare(symbol, self.value, self._like(other)))

    return compare


class Register:
    """An LLVM value with Python's operators; the other operand is one of the same type, or a number.

    Integers are signed and keep their width, comparisons with NaN are false but for ``!=``. ``//`` and ``%`` by a positive number round down, as in
    Python; by a register, neither may be negative.
    """

    __slots__ = ("builder", "value")

    def __init__(self, builder, value):
        self.builder, self.value = builder, value

    @property
    def is_integer(self):
        return isinstance(self.value.type, ir.IntType)

    def _like(self, other):
        return other.value if isinstance(other, Register) else ir.Constant(self.value.type, other)

    __add__ = __radd__ = _binary("add", "fadd")
    __mul__ = __rmul__ = _binary("mul", "fmul")
    __sub__ = _binary("sub", "fsub")
    __rsub__ = _binary("sub", "fsub", swapped=True)
    __truediv__ = _binary(None, "fdiv")
    __rtruediv__ = _binary(None, "fdiv", swapped=True)
    __and__ = __rand__ = _binary("and_")
    __or__ = __ror__ = _binary("or_")
    __xor__ = __rxor__ = _binary("xor")
    __lshift__, __rshift__ = _binary("shl"), _binary("ashr")

    def __floordiv__(self, divisor):
        if isinstance(divisor, Register):
            return Register(self.builder, self.builder.udiv(self.value, divisor.value))
        if divisor & (divisor - 1) == 0:
            return self >> (divisor.bit_length() - 1) if divisor > 1 else self
        quotient = Register(self.builder, self.builder.sdiv(self.value, self._like(divisor)))  # towards zero
        below = self.builder.zext((self - quotient * divisor < 0).value, self.value.type)
        return quotient - Register(self.builder, below)

    def __mod__(self, divisor):
        if isinstance(divisor, Register):
            return Register(self.builder, self.builder.urem(self.value, divisor.value))
        return self & (divisor - 1) if divisor & (divisor - 1) == 0 else self - self // divisor * divisor

    __lt__, __le__, __gt__, __ge__ = (_relation(symbol) for symbol in ("<", "<=", ">", ">="))
    __eq__, __ne__ = _relation("=="), _relation("!=")
    __hash__ = None

    def __bool__(self):
        raise TypeError("a register has no value yet when the kernel is compiled; use ops.select or ops.store_row(..., valid)")


class RegisterArray:
    """A Numba array argument: data pointer, shape and byte strides (members 4, 5 and 6 of Numba's array struct)."""

    def __init__(self, builder, kind, value):
        self.builder = builder
        self.data = builder.extract_value(value, 4)
        self.shape = [Register(builder, builder.trunc(builder.extract_value(value, [5, i]), llvm_i32)) for i in range(kind.ndim)]
        self.strides = [builder.extract_value(value, [6, i]) for i in range(kind.ndim)]

    @property
    def element(self):
        return self.data.type.pointee

    def shared(self, index, step):
        """Shared-memory pointer to element ``index + step`` of a contiguous vector; ``step`` ends up in the instruction.

        The address is computed in 32 bits, all that shared memory has: half the integer instructions of a generic pointer.
        """
        builder, kind = self.builder, self.element.as_pointer(3)
        base = builder.ptrtoint(builder.addrspacecast(self.data, kind), llvm_i32)
        address = builder.add(base, builder.mul(index.value, ir.Constant(llvm_i32, _size(self.element))))
        pointer = builder.inttoptr(address, kind)
        return builder.gep(pointer, [ir.Constant(llvm_i32, step)]) if step else pointer


@dataclass(frozen=True)
class _Place:
    address: ir.Value
    strides: list
    element: ir.Type


_PTX = {  # type, register, zero
    llvm_f32: ("f32", "f", "0f00000000"),
    _F64: ("f64", "d", "0d0000000000000000"),
    _I16: ("u16", "h", "0"),
    llvm_i32: ("b32", "r", "0"),
    _I64: ("b64", "l", "0"),
}


_FETCHED = {  # result, register, type of its move, zero
    "u8": (llvm_i32, "r", "b32", "0"),
    "u16": (llvm_i32, "r", "b32", "0"),
    "b32": (llvm_i32, "r", "b32", "0"),
    "s64": (_I64, "l", "b64", "0"),
    "f32": (llvm_f32, "f", "f32", "0f00000000"),
}


EXP2_TERMS = (0.9999280730822502, 0.6932609947875351, 0.24261113132813386, 0.055171602195352415)
"""Of the polynomial of degree 3 that is 2**x from -1/2 to 1/2 with the least relative error, 7.5e-5; from the constant term on."""


def exp2_by_fma(builder, x):
    """2 to the power of a float32 that is not above 127, without the special-function unit; below -127 it is 0. The relative error is 7.5e-5.

    x is split into the nearest integer, the low bits of its sum with 1.5 * 2**23, and a rest for the polynomial; -127 becomes a factor of 0.
    """
    lowest, bits = (f"0f{struct.pack('>f', n).hex()}" for n in (-127.0, 1.5 * 2**23))
    *terms, first = (f"0f{struct.pack('>f', term).hex()}" for term in EXP2_TERMS)
    text = (
        f"{{.reg .f32 x, n, rest, y; .reg .b32 power; max.NaN.f32 x, $1, {lowest}; add.rn.f32 n, x, {bits}; mov.b32 power, n;"
        f"sub.rn.f32 n, n, {bits}; sub.rn.f32 rest, x, n; mov.f32 y, {first};{''.join(f'fma.rn.f32 y, y, rest, {term};' for term in reversed(terms))}"
        "shl.b32 power, power, 23; add.s32 power, power, 0x3f800000; mov.b32 n, power; mul.rn.f32 $0, y, n;}"
    )
    return emit(builder, llvm_f32, [x], text, "=f,f", pure=True)


class GpuOps:
    """What a body can do beyond the operators of `Register`, as LLVM code."""

    def __init__(self, builder):
        self.builder = builder

    def constant(self, dtype, value):
        """A float."""
        return Register(self.builder, ir.Constant(_FLOATS[dtype], value))

    def integer(self, value):
        """An int32."""
        return Register(self.builder, ir.Constant(llvm_i32, value))

    def wide(self, x):
        """An int32 as int64."""
        return Register(self.builder, self.builder.sext(x.value, _I64))

    def narrow(self, x):
        """The lower half of an int64 as int32."""
        return Register(self.builder, self.builder.trunc(x.value, llvm_i32))

    def halves(self, x):
        """(low, high) words of 64 bits, as int32."""
        return [self.narrow(x), self.narrow(x >> 32)]

    def real(self, dtype, x):
        """An int32 or a float as another float, rounded to nearest even."""
        if x.is_integer:
            return Register(self.builder, self.builder.sitofp(x.value, _FLOATS[dtype]))
        if x.value.type == _FLOATS[dtype]:
            return x
        convert = self.builder.fptrunc if dtype == "float32" else self.builder.fpext
        return Register(self.builder, convert(x.value, _FLOATS[dtype]))

    def absolute(self, x):
        """The absolute value of a float."""
        return self._libdevice("__nv_fabsf" if x.value.type == llvm_f32 else "__nv_fabs", x)

    def is_negative_zero(self, x):
        """Whether a float is -0.0, bit for bit."""
        integer = llvm_i32 if x.value.type == llvm_f32 else _I64
        bits = self.builder.bitcast(x.value, integer)
        return Register(self.builder, self.builder.icmp_signed("==", bits, ir.Constant(integer, -(2 ** (integer.width - 1)))))

    def product(self, a, b):
        """The product of floats, rounded, whatever is done with it then: LLVM makes an fma of ``a * b + c``."""
        suffix, register = ("f32", "f") if a.value.type == llvm_f32 else ("f64", "d")
        return self._pure(a.value.type, f"mul.rn.{suffix} $0, $1, $2;", f"={register},{register},{register}", a, b)

    def fma(self, a, b, c):
        return Register(self.builder, self.builder.fma(a.value, b.value, c.value))

    def wide_product(self, a, b):
        """(low, high) words of the 64-bit product of two int32 read as unsigned: one instruction.

        In LLVM's arithmetic, its optimiser would turn what follows into products of 64-bit numbers, three instructions each.
        """
        text = "{.reg .b64 product; mul.wide.u32 product, $2, $3; mov.b64 {$0, $1}, product;}"
        words = ir.LiteralStructType([llvm_i32] * 2)
        product = emit(self.builder, words, [a.value, b.value], text, "=r,=r,r,r", pure=True)
        return [Register(self.builder, self.builder.extract_value(product, i)) for i in (0, 1)]

    def wide_multiple(self, a, factor, beside=None):
        """(low, high) words of the 64-bit product of an int32, read as unsigned, and a constant below 2**32, the high one from the float64 unit.

        For GPUs with many of those, such as an H200, where `wide_product` bounds what is made of many of them. a stands in the low word of
        2**52 + a; the sum 2**52 + a * factor / 2**32, rounded towards zero, ends with the high word. A third result is the other word of that
        sum, that of 2**52: given as ``beside`` with a number that is computed where the high word stands, it saves building a pair of registers.
        """
        scale, rest = (struct.pack(">d", x).hex() for x in (factor / 2.0**32, 2.0**52 - 2.0**20 * factor))
        beside = self.integer(0x43300000) if beside is None else beside
        text = (
            "{.reg .b64 wide; mov.b64 wide, {$3, $4};"
            f"fma.rz.f64 wide, wide, 0d{scale}, 0d{rest}; mov.b64 {{$1, $2}}, wide; mul.lo.u32 $0, $3, {factor};}}"
        )
        product = emit(self.builder, ir.LiteralStructType([llvm_i32] * 3), [a.value, beside.value], text, "=&r,=&r,=&r,r,r", pure=True)
        return [Register(self.builder, self.builder.extract_value(product, i)) for i in (0, 1, 2)]

    def permute(self, a, b, selector):
        """An int32 made of bytes of a (0 to 3) and b (4 to 7): each hexadecimal digit of the selector, a number or an int32, is one; 8 more fill its
        place with its sign."""
        selector = selector if isinstance(selector, Register) else self.integer(selector)
        return self._pure(llvm_i32, "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", a, b, selector)

    def two_bytes(self, a, b, byte):
        """256 times that byte of a, which must be below 128, plus that of b; ``byte`` is a number or an int32."""
        return self.permute(a, b, byte * 0x1111 + 0x8804)

    def next_bytes(self, a):
        """Each byte in the place of the one below, the lowest one in the highest place."""
        return self.permute(a, a, 0x0321)

    def product_of_halves(self, element, a, b):
        """The products of two f16 or bf16 each."""
        return self._pure(llvm_i32, f"mul.rn.{element}x2 $0, $1, $2;", "=r,r,r", a, b)

    def not_below_float16(self, a, b):
        """Of each half of two words, read as a float16: all bits 1 where a's is not below b's, else 0."""
        return self._pure(llvm_i32, "set.ge.u32.f16x2 $0, $1, $2;", "=r,r,r", a, b)

    def minimum(self, a, b):
        """The smaller one of integers."""
        return self.select(a < b, a, b)

    def maximum(self, a, b):
        """The larger one; the other one where one is NaN."""
        if a.is_integer:
            return self.select(a > b, a, b)
        suffix, register = ("f32", "f") if a.value.type == llvm_f32 else ("f64", "d")
        return self._pure(a.value.type, f"max.{suffix} $0, $1, $2;", f"={register},{register},{register}", a, b)

    def select(self, condition, a, b):
        """a or b (which may be a number)."""
        return Register(self.builder, self.builder.select(condition.value, a.value, a._like(b)))

    def opaque(self, x):
        """An int32 as if it were another one: what follows from it is computed where it stands, and not kept in registers from before."""
        return Register(self.builder, emit(self.builder, llvm_i32, [x.value], "mov.b32 $0, $1;", "=r,r"))

    def truth(self, condition):
        """A comparison as an int32."""
        return Register(self.builder, self.builder.zext(condition.value, llvm_i32))

    def exp2(self, x):
        """2 to the power of a float32: the special-function unit, 2 ulp; results below 2**-126 are 0."""
        return self._pure(llvm_f32, "ex2.approx.ftz.f32 $0, $1;", "=f,f", x)

    def exp2_by_fma(self, x):
        """2 to the power of a float32 that is not above 127: some ten instructions elsewhere than in the special-function unit; see `exp2_by_fma`."""
        return Register(self.builder, exp2_by_fma(self.builder, x.value))

    def log2(self, x):
        """Binary logarithm of a float32: the special-function unit."""
        return self._pure(llvm_f32, "lg2.approx.ftz.f32 $0, $1;", "=f,f", x)

    def reciprocal(self, x):
        """1 / x of a float32: the special-function unit, 1 ulp."""
        return self._pure(llvm_f32, "rcp.approx.ftz.f32 $0, $1;", "=f,f", x)

    def tanh_approx(self, x):
        """Hyperbolic tangent of a float32: the special-function unit, a relative error of 2**-11."""
        return self._pure(llvm_f32, "tanh.approx.f32 $0, $1;", "=f,f", x)

    def exp(self, x):
        """e to the power of a float, in full precision."""
        return self._libdevice("__nv_expf" if x.value.type == llvm_f32 else "__nv_exp", x)

    def log(self, x):
        """Natural logarithm in full precision."""
        return self._libdevice("__nv_logf" if x.value.type == llvm_f32 else "__nv_log", x)

    def tanh(self, x):
        """Hyperbolic tangent, within 2 ulp of any argument: some 20 instructions in float32."""
        return self._libdevice("__nv_tanhf" if x.value.type == llvm_f32 else "__nv_tanh", x)

    def exchange(self, values, mask):
        """The values of the lane whose number differs by ``mask``, a power of two. All lanes of the warp take part."""
        return [self._exchange(x, mask) for x in values]

    def _exchange(self, x, mask):
        if x.value.type == llvm_f32:
            text, constraints = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;", "=f,f"
        elif x.is_integer:
            text, constraints = f"shfl.sync.bfly.b32 $0, $1, {mask}, 0x1f, 0xffffffff;", "=r,r"
        else:
            text, constraints = (
                "{.reg .b32 low, high; mov.b64 {low, high}, $1;\n"
                f"shfl.sync.bfly.b32 low, low, {mask}, 0x1f, 0xffffffff; shfl.sync.bfly.b32 high, high, {mask}, 0x1f, 0xffffffff;\n"
                "mov.b64 $0, {low, high};}",
                "=d,d",
            )
        return Register(self.builder, emit(self.builder, x.value.type, [x.value], text, constraints))

    def _pure(self, result, text, constraints, *args):
        return Register(self.builder, emit(self.builder, result, [x.value for x in args], text, constraints, pure=True))

    def _libdevice(self, name, x):
        module, kind = self.builder.module, x.value.type
        function = module.globals.get(name) or ir.Function(module, ir.FunctionType(kind, [kind]), name)
        return Register(self.builder, self.builder.call(function, [x.value]))

    # ---- memory: runs of elements, aligned to their size together. `memory` is a contiguous array in shared memory.

    def _read(self, pointer, element, count):
        builder, space = self.builder, pointer.type.addrspace
        if count == 1:
            return [builder.load(builder.bitcast(pointer, element.as_pointer(space)), align=_size(element))]
        kind = ir.VectorType(element, count)
        vector = builder.load(builder.bitcast(pointer, kind.as_pointer(space)), align=_size(element) * count)
        return [builder.extract_element(vector, ir.Constant(llvm_i32, i)) for i in range(count)]

    def _write(self, pointer, values):
        builder, element, space = self.builder, values[0].value.type, pointer.type.addrspace
        if len(values) == 1:
            builder.store(values[0].value, builder.bitcast(pointer, element.as_pointer(space)), align=_size(element))
            return
        kind = ir.VectorType(element, len(values))
        vector = ir.Constant(kind, ir.Undefined)
        for i, x in enumerate(values):
            vector = builder.insert_element(vector, x.value, ir.Constant(llvm_i32, i))
        builder.store(vector, builder.bitcast(pointer, kind.as_pointer(space)), align=_size(element) * len(values))

    def load(self, memory, index, step, count):
        """Elements from ``index + step`` on of shared memory; ``step`` is constant."""
        return [Register(self.builder, x) for x in self._read(memory.shared(index, step), memory.element, count)]

    def store(self, memory, index, step, values):
        """Store to elements from ``index + step`` on of shared memory; ``step`` is constant."""
        self._write(memory.shared(index, step), values)

    def place(self, array, indices, contiguous=False):
        """An element of an array in global memory; ``contiguous`` says that the last axis has no gaps."""
        builder, address = self.builder, self.builder.ptrtoint(array.data, _I64)
        for index, stride in zip(indices, array.strides, strict=True):
            address = builder.add(address, builder.mul(builder.sext(index.value, _I64), stride))
        strides = [*array.strides[:-1], ir.Constant(_I64, _size(array.element))] if contiguous else array.strides
        return _Place(address, strides, array.element)

    def moved(self, place, axis, step):
        """The place a constant number of steps along an axis away."""
        if not step:
            return place
        offset = self.builder.mul(place.strides[axis], ir.Constant(_I64, step))
        return _Place(self.builder.add(place.address, offset), place.strides, place.element)

    def load_row(self, place, count, valid):
        """Elements along the last axis from a place on; zeros, and no access, unless valid. The kernel must not write there."""
        element = place.element
        kind, register, zero = _PTX[element]
        results = [f"${i}" for i in range(count)]
        text = (
            f"{{.reg .pred p; setp.ne.b32 p, ${count + 1}, 0;\n"
            + "".join(f"mov.{kind} {x}, {zero};\n" for x in results)
            + (f"@p ld.global.{kind} $0, [${count}];}}" if count == 1 else f"@p ld.global.v{count}.{kind} {{{', '.join(results)}}}, [${count}];}}")
        )
        constraints = ",".join([f"=&{register}"] * count + ["l", "r"])
        args = [place.address, self.builder.zext(valid.value, llvm_i32)]
        result = element if count == 1 else ir.LiteralStructType([element] * count)
        loaded = emit(self.builder, result, args, text, constraints, pure=True)
        return [Register(self.builder, loaded if count == 1 else self.builder.extract_value(loaded, i)) for i in range(count)]

    def load_byte(self, place, valid):
        """The byte at a place, as int32; 0, and no access, unless valid. The kernel must not write there."""
        args = [place.address, self.builder.zext(valid.value, llvm_i32)]
        text = "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.b32 $0, 0; @p ld.global.u8 $0, [$1];}"
        return Register(self.builder, emit(self.builder, llvm_i32, args, text, "=&r,l,r", pure=True))

    def store_row(self, place, values, valid):
        """Store along the last axis from a place on, if valid."""
        kind, register, _ = _PTX[place.element]
        count = len(values)
        sources = [f"${i}" for i in range(2, 2 + count)]
        text = "{.reg .pred p; setp.ne.b32 p, $1, 0;\n" + (
            f"@p st.global.{kind} [$0], $2;}}" if count == 1 else f"@p st.global.v{count}.{kind} [$0], {{{', '.join(sources)}}};}}"
        )
        args = [place.address, self.builder.zext(valid.value, llvm_i32), *(x.value for x in values)]
        emit(self.builder, ir.VoidType(), args, text, ",".join(["l", "r", *[register] * count, "~{memory}"]))

    def add_to(self, place, value):
        """Add to an element in global memory, atomically; subnormal sums may become 0."""
        kind, register, _ = _PTX[place.element]
        emit(self.builder, ir.VoidType(), [place.address, value.value], f"red.global.add.{kind} [$0], $1;", f"l,{register},~{{memory}}")

    def store_at(self, address, value, valid):
        """Store a float32 at an address (int64) of global memory, if valid."""
        args = [address.value, value.value, self.builder.zext(valid.value, llvm_i32)]
        text = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.f32 [$0], $1;}"
        emit(self.builder, ir.VoidType(), args, text, "l,f,r,~{memory}")

    def put(self, address, value, valid):
        """Store an int32 at an address (int64) of global memory, if valid."""
        args = [address.value, value.value, self.builder.zext(valid.value, llvm_i32)]
        text = "{.reg .pred p; setp.ne.b32 p, $2, 0; @p st.global.b32 [$0], $1;}"
        emit(self.builder, ir.VoidType(), args, text, "l,r,r,~{memory}")

    def load_at(self, address, valid):
        """The float32 at an address (int64) of global memory; 0, and no access, unless valid."""
        text = "{.reg .pred p; setp.ne.b32 p, $2, 0; mov.f32 $0, 0f00000000; @p ld.global.f32 $0, [$1];}"
        args = [address.value, self.builder.zext(valid.value, llvm_i32)]
        return Register(self.builder, emit(self.builder, llvm_f32, args, text, "=&f,l,r,~{memory}"))

    def fetch(self, kind, address, step, count=None, bound=0):
        """What lies ``step`` (a constant) bytes from an address (int64) of global memory that no kernel is writing: "u8", "u16" and "b32" as int32,
        "s64" as int64, "f32" as float32. With a ``count``, 0 and no access unless it is above the constant ``bound``."""
        result, register, move, zero = _FETCHED[kind]
        load = f"ld.global.nc.{kind} $0, [$1+{step}];" if kind != "s64" else f"ld.global.nc.b64 $0, [$1+{step}];"
        if count is None:
            return Register(self.builder, emit(self.builder, result, [address.value], load, f"={register},l"))
        text = f"{{.reg .pred p; setp.gt.s32 p, $2, {bound}; mov.{move} $0, {zero}; @p {load}}}"
        return Register(self.builder, emit(self.builder, result, [address.value, count.value], text, f"=&{register},l,r"))

    def copy_16(self, shared, address, valid, writes=None):
        """Start cp.async of 16 bytes from an address (int64) of global memory to one (int32) of shared memory; zeros, and no access, unless valid;
        nothing unless it ``writes``."""
        read = self.builder.select(valid.value, ir.Constant(llvm_i32, 16), ir.Constant(llvm_i32, 0))
        text, args = "cp.async.cg.shared.global.L2::128B [$0], [$1], 16, $2;", [shared.value, address.value, read]
        if writes is not None:
            text = f"{{.reg .pred p; setp.ne.b32 p, $3, 0; @p {text}}}"
            args.append(self.builder.zext(writes.value, llvm_i32))
        emit(self.builder, ir.VoidType(), args, text, ",".join(["r", "l", *["r"] * (len(args) - 2), "~{memory}"]))

    def floats_at(self, space, address, step, count, valid=None):
        """1, 2 or 4 float32 from ``step`` (a constant) bytes after an address on, of "shared" (int32) or "global" (int64) memory; 0, and no access,
        unless valid."""
        results = [f"${i}" for i in range(count)]
        vector, names = (f".v{count}", f"{{{', '.join(results)}}}") if count > 1 else ("", results[0])
        load, kind = f"ld.{space}{vector}.f32 {names}, [${count}+{step}];", "r" if space == "shared" else "l"
        args, inputs = [address.value], kind
        if valid is not None:
            zeros = "".join(f"mov.f32 {x}, 0f00000000;" for x in results)
            load, inputs = f"{{.reg .pred p; setp.ne.b32 p, ${count + 1}, 0; {zeros} @p {load}}}", f"{kind},r"
            args.append(self.builder.zext(valid.value, llvm_i32))
        result = llvm_f32 if count == 1 else ir.LiteralStructType([llvm_f32] * count)
        found = emit(self.builder, result, args, load, ",".join(["=&f"] * count + [inputs, "~{memory}"]))
        return [Register(self.builder, x) for x in ([found] if count == 1 else [self.builder.extract_value(found, i) for i in range(count)])]

    def put_floats(self, space, address, step, values, valid=None):
        """Store 1, 2 or 4 float32 likewise, if valid."""
        count = len(values)
        names = ", ".join(f"${1 + i}" for i in range(count))
        vector, names = (f".v{count}", f"{{{names}}}") if count > 1 else ("", names)
        text, inputs = f"st.{space}{vector}.f32 [$0+{step}], {names};", ["r" if space == "shared" else "l", *["f"] * count]
        args = [address.value, *(x.value for x in values)]
        if valid is not None:
            text = f"{{.reg .pred p; setp.ne.b32 p, ${count + 1}, 0; @p {text}}}"
            inputs.append("r")
            args.append(self.builder.zext(valid.value, llvm_i32))
        emit(self.builder, ir.VoidType(), args, text, ",".join([*inputs, "~{memory}"]))

    def two_16bit(self, element, low, high):
        """An int32 of two float32 rounded to "f16" or "bf16"."""
        return self._pure(llvm_i32, f"cvt.rn.{element}x2.f32 $0, $1, $2;", "=r,f,f", high, low)

    def pair(self, dtype, word):
        """The float32 values of the lower and the upper half of an int32 that holds two float16 or bfloat16."""
        if dtype == "float16":
            halves = ("{.reg .b16 h, u; mov.b32 {h, u}, $1; cvt.f32.f16 $0, h;}", "{.reg .b16 h, u; mov.b32 {h, u}, $1; cvt.f32.f16 $0, u;}")
            return [self._pure(llvm_f32, text, "=f,r", word) for text in halves]
        return [self.as_float(word << 16), self.as_float(word & -65536)]

    def as_integer(self, x):
        """The bits of a float32 as int32."""
        return Register(self.builder, self.builder.bitcast(x.value, llvm_i32))

    def as_float(self, word):
        """The float32 of the bits of an int32."""
        return Register(self.builder, self.builder.bitcast(word.value, llvm_f32))

    def copy_row(self, memory, index, step, place, count, valid):
        """Start cp.async of elements (4, 8 or 16 bytes) along the last axis to ``index + step`` of shared memory; zeros, and no
        access, unless valid."""
        builder, size = self.builder, _size(place.element) * count
        shared = builder.ptrtoint(memory.shared(index, step), llvm_i32)
        read = builder.select(valid.value, ir.Constant(llvm_i32, size), ir.Constant(llvm_i32, 0))
        text = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0], [$1], {size}, $2;"
        emit(builder, ir.VoidType(), [shared, place.address, read], text, "r,l,r,~{memory}")

    # ---- 16-bit elements, held as bits

    def float32_of(self, dtype, bits):
        """The float32 value of the 16 bits of a float16 or bfloat16."""
        if dtype == "float16":
            return self._pure(llvm_f32, "cvt.f32.f16 $0, $1;", "=f,h", bits)
        builder = self.builder
        return Register(builder, builder.bitcast(builder.shl(builder.zext(bits.value, llvm_i32), ir.Constant(llvm_i32, 16)), llvm_f32))

    def bits_of(self, dtype, x):
        """The bits of a float32 rounded to nearest even as float16 or bfloat16."""
        if dtype == "float16":
            return self._pure(_I16, "cvt.rn.f16.f32 $0, $1;", "=h,f", x)
        # Compute capability 7 has no instruction for it: round the upper half by hand.
        builder, shift = self.builder, ir.Constant(llvm_i32, 16)
        bits = builder.bitcast(x.value, llvm_i32)
        odd = builder.and_(builder.lshr(bits, shift), ir.Constant(llvm_i32, 1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, ir.Constant(llvm_i32, 0x7FFF))), shift)
        bits = builder.select(builder.fcmp_unordered("uno", x.value, x.value), ir.Constant(llvm_i32, 0x7FC0), rounded)
        return Register(builder, builder.trunc(bits, _I16))

    def word_of(self, dtype, low, high):
        """An int32 that holds two float32 rounded so."""
        low, high = (self.builder.zext(self.bits_of(dtype, x).value, llvm_i32) for x in (low, high))
        return Register(self.builder, self.builder.or_(low, self.builder.shl(high, ir.Constant(llvm_i32, 16))))
