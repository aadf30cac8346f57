"""The register kernels as launches: template arguments, function constants and grids, as the C++
schedule makes them. A problem whose rows do not fill the last block takes two dispatches.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from shader_cases import (
    CONSTANT_ACCUMULATE,
    CONSTANT_IS_PAGED,
    CONSTANT_IS_RAGGED,
    KEY_SIDE,
    SLOTS,
    Case,
    Launch,
    Params,
    Tensors,
    compile_launch,
)
from shader_options import ShaderOptions, function_constants
from simulator import SHADERS, Library, Run, Simulator

# Computed by register kernels.
REGISTER_KERNELS = ("forward", "backward_dq", "backward_dkv", "backward_dv", "backward_dk")
CONSTANT_FULL_ROWS, CONSTANT_VECTOR_ROWS, CONSTANT_EXACT_TILES, CONSTANT_SELECTS = 16, 17, 18, 19
CONSTANT_IS_SPLIT = 20
STATUS_GOOD, STATUS_LANE_MAP, STATUS_NON_FINITE = 0, 1, 2
REGISTER_HEADERS = ("lane_map.h", "lane_map_probe.metal", "exchange.h", "block_ranges.h")
FRAGMENTS = {
    "float32": ("float", "float"),
    "float16": ("half", "half"),
    "bfloat16": ("Bfloat16", "float"),
}
EXCHANGES = {"any": "kExchangeAny", "apple": "kExchangeApple"}


@dataclass(frozen=True)
class Register:
    """One instance of a register kernel."""

    kernel: str
    head_tile: int = 16
    value_tile: int = 16
    dtype: str = "float32"
    row_fragments: int = 1
    block: int = 16  # rows of the other side per step
    simdgroups: int = 2
    exchange: str = "any"
    held: bool = True  # the first own operand stays in registers
    value_held: bool = True  # and so does the second one

    @property
    def block_rows(self) -> int:
        return 8 * self.row_fragments * self.simdgroups

    def launch(self) -> Launch:
        storage, factor = FRAGMENTS[self.dtype]
        tiles = f"{storage}, {factor}, {self.head_tile}, {self.value_tile}"
        shape = f"{self.row_fragments}, {self.block}, {self.simdgroups}"
        head = self.head_tile // 8 if self.held else 1
        value = self.value_tile // 8 if self.value_held else 1
        parts = {
            "forward": f"{head}, {EXCHANGES[self.exchange]}",
            "backward_dq": f"{head}, {value}, {EXCHANGES[self.exchange]}",
            "backward_dkv": f"{head}, {value}, true, true, {EXCHANGES[self.exchange]}",
            "backward_dv": f"{head}, 1, true, false, {EXCHANGES[self.exchange]}",
            "backward_dk": f"{head}, {value}, false, true, {EXCHANGES[self.exchange]}",
        }[self.kernel]
        shader = "register_dkv" if self.kernel in KEY_SIDE else f"register_{self.short_name}"
        arguments = f"{tiles}, {shape}, {parts}"
        return Launch(
            kernel=self.kernel,
            shader=shader,
            instantiation=f'FLASHATTN_INSTANTIATE("{self.kernel}", {shader}, {arguments})',
            block_rows=self.block_rows,
            block_columns=self.block,
            threads=32 * self.simdgroups,
            half_fragments=factor == "half",
            constants={
                CONSTANT_FULL_ROWS: True,
                CONSTANT_VECTOR_ROWS: True,
                CONSTANT_EXACT_TILES: True,
                CONSTANT_SELECTS: False,
                CONSTANT_IS_RAGGED: False,
                **dict.fromkeys(
                    (CONSTANT_IS_PAGED, CONSTANT_IS_SPLIT)
                    if self.kernel == "forward"
                    else (CONSTANT_ACCUMULATE,),
                    False,
                ),
                **function_constants(ShaderOptions()),
            },
        )

    @property
    def short_name(self) -> str:
        return self.kernel.removeprefix("backward_")

    def constants_for(self, case: Case, full: bool, vectors: bool = True) -> dict[int, bool]:
        contiguous = case.head_dim % 4 == 0 and case.value_dim % 4 == 0
        exact = (case.head_dim, case.value_dim) == (self.head_tile, self.value_tile)
        return {
            CONSTANT_SELECTS: case.non_finite != "",
            CONSTANT_FULL_ROWS: full,
            CONSTANT_VECTOR_ROWS: vectors and contiguous,
            CONSTANT_EXACT_TILES: exact,
            **function_constants(case.options),
        }


def is_register_file(path: Path) -> bool:
    """Whether only register kernels use the file of shaders/."""
    return path.name.startswith("register_") or path.name in REGISTER_HEADERS


def tile_of(dim: int) -> int:
    return (dim + 15) // 16 * 16


def fitting(kernel: str, case: Case, **settings: object) -> Register:
    """The instance whose tiles fit the case."""
    tiles = {"head_tile": tile_of(case.head_dim), "value_tile": tile_of(case.value_dim)}
    return Register(kernel=kernel, dtype=case.dtype, **tiles, **settings)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Options:
    """How a run differs from what the host would choose."""

    accumulate: bool = False
    vectors: bool = True  # contiguous rows are copied four elements at a time
    max_slack: float = 0.0
    unchecked: bool = True  # full blocks go without row checks
    selects: bool | None = None  # by default where the case has values that are not finite


def run_register(
    library: Library,
    register: Register,
    case: Case,
    tensors: Tensors,
    options: Options | None = None,
) -> list[Run]:
    """The dispatches of one pass: full blocks, then the ragged one."""
    options = options or Options()
    a = dict(tensors.arrays)
    if register.kernel.startswith("backward"):
        a["lse"] = np.ascontiguousarray(tensors.expected["lse"], np.float32)
        a["delta"] = np.ascontiguousarray(tensors.expected["delta"], np.float32)
    key_side = register.kernel in KEY_SIDE
    rows = case.seqlen_k if key_side else case.seqlen_q
    heads = (case.kv_heads if key_side else case.query_heads) * case.batch
    full, ragged = divmod(rows, register.block_rows)
    if not options.unchecked:
        full, ragged = 0, rows
    launch = register.launch()
    runs = []
    for first, count, is_full in (
        (0, full, True),
        (full, -(-ragged // register.block_rows), False),
    ):
        if count == 0:
            continue
        params = Params.from_buffer_copy(tensors.arrays["params"].tobytes())
        params.first_block, params.blocks = first, count
        params.max_slack = options.max_slack
        a["params"] = np.frombuffer(bytearray(bytes(params)), np.uint8)
        constants = {**launch.constants, **register.constants_for(case, is_full, options.vectors)}
        if options.selects is not None:
            constants[CONSTANT_SELECTS] = options.selects
        if CONSTANT_ACCUMULATE in constants:
            constants[CONSTANT_ACCUMULATE] = options.accumulate
        kernel = library.kernel(launch.kernel, constants)
        buffers: list[np.ndarray | bytes | None] = [a.get(name) for name in SLOTS]
        runs.append(kernel((count * heads, 1, 1), (launch.threads, 1, 1), buffers))
    return runs


FEW_ROWS = 8  # and the rows of a threadgroup that merges chunks


def merge_launch(dtype: str, name: str = "merge_chunks") -> Launch:
    """What puts the chunks of few rows together."""
    storage, _ = FRAGMENTS[dtype]
    return Launch(
        kernel=name,
        shader="merge_chunks",
        instantiation=f'FLASHATTN_INSTANTIATE("{name}", merge_chunks, {storage}, {FEW_ROWS})',
        block_rows=FEW_ROWS,
        block_columns=0,
        threads=32 * FEW_ROWS,
        constants={CONSTANT_IS_RAGGED: False, **function_constants(ShaderOptions())},
    )


def probe_launch(factor: str = "float") -> Launch:
    """What tells the host the lane map."""
    return Launch(
        kernel="probe",
        shader="lane_map_probe",
        instantiation=f'FLASHATTN_INSTANTIATE("probe", lane_map_probe, {factor})',
        block_rows=2,
        block_columns=0,
        threads=64,
    )


def run_chunks(
    library: Library, register: Register, case: Case, tensors: Tensors, chunk_keys: int
) -> Run:
    """The dispatch over chunks of keys of a forward pass of few rows, without their merging."""
    launch = register.launch()
    params = Params.from_buffer_copy(tensors.arrays["params"].tobytes())
    params.few_rows, params.chunk_keys = case.seqlen_q, chunk_keys
    params.chunks = -(-case.seqlen_k // chunk_keys)
    rows = case.batch * case.query_heads * case.seqlen_q
    arrays = tensors.arrays
    arrays["params"] = np.frombuffer(bytearray(bytes(params)), np.uint8)
    arrays["partial_out"] = np.full((rows, params.chunks, case.value_dim), np.nan, np.float32)
    arrays["partial_state"] = np.full((rows, params.chunks, 2), np.nan, np.float32)
    buffers: list[np.ndarray | bytes | None] = [arrays.get(name) for name in SLOTS]
    constants = {**launch.constants, **register.constants_for(case, full=False)}
    constants[CONSTANT_IS_SPLIT] = True
    groups = -(-(case.query_heads // case.kv_heads) // register.simdgroups)
    grid = params.chunks * case.batch * case.kv_heads * groups
    kernel = library.kernel(launch.kernel, constants)
    return kernel((grid, 1, 1), (launch.threads, 1, 1), buffers)


def run_split(
    simulator: Simulator,
    register: Register,
    case: Case,
    tensors: Tensors,
    chunk_keys: int,
    folder: Path = SHADERS,
) -> list[Run]:
    """A forward pass of few rows: a dispatch over chunks of keys, then their merging."""
    library = compile_launch(simulator, register.launch(), folder)
    runs = [run_chunks(library, register, case, tensors, chunk_keys)]
    buffers = [tensors.arrays.get(name) for name in SLOTS]
    launch = merge_launch(case.dtype).with_constants(function_constants(case.options))
    merge = compile_launch(simulator, launch, folder).kernel(launch.kernel, launch.constants)
    grid = case.batch * case.query_heads
    return [*runs, merge((grid, 1, 1), (launch.threads, 1, 1), buffers)]
