"""Units of the register kernels, and of the one that merges chunks of keys: the instances that the
cost model has, in every storage type, the small ones under three maps and with options, and each of
their barriers deleted.

Kernels look for values that are not finite and select (kConstantSelects): the problems have some.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "cost_model"))

from costed import REGISTER
from register_cases import Register, is_register_file, merge_launch
from shader_cases import KEY_SIDE
from units import BARRIER, DROPOUT, IDS, NEUTRAL, RAGGED, SHADERS, Unit

KINDS = {
    "forward": "kForward",
    "backward_dq": "kBackwardDq",
    "backward_dv": "kBackwardDv",
    "backward_dk": "kBackwardDk",
    "backward_dkv": "kBackwardDkv",
}
SELECTS = 1 << IDS["Selects"]
SPLIT = 1 << IDS["IsSplit"]
FULL = sum(1 << IDS[n] for n in ("FullRows", "VectorRows", "ExactTiles"))
ACCUMULATE = 1 << IDS["Accumulate"]
OPTIONS = {
    "forward": NEUTRAL | RAGGED | 1 << IDS["HasSinks"],
    "backward_dq": NEUTRAL | RAGGED | 1 << IDS["SlopeGradient"],
}
# Barriers whose loss racecheck does not report; the simulated device's checker does
# (test_register_barriers.py). Each thread reads what it replaces just before, so that the write
# follows a read of its own: it seems that racecheck remembers only the last one.
UNSEEN = {("register_finite.h", 2)}
STORAGE_KINDS = {"float32": "kFloat32", "float16": "kFloat16", "bfloat16": "kBFloat16"}


def small(kernel: str, dtype: str = "float32") -> Register:
    return Register(kernel, head_tile=32, value_tile=16, dtype=dtype)


def shader_of(kernel: str) -> str:
    return "register_dkv" if kernel in KEY_SIDE else small(kernel).launch().shader


@dataclass(frozen=True)
class Instance:
    """One kernel of a unit."""

    register: Register

    @property
    def host_name(self) -> str:
        r = self.register
        held = f"{'' if r.held else '_read'}{'' if r.value_held else '_read_value'}"
        return (
            f"register_{r.kernel}_{r.dtype}_d{r.head_tile}_v{r.value_tile}_r{r.block_rows}"
            f"_c{r.block}_s{r.simdgroups}{held}_{r.exchange}"
        )

    @property
    def line(self) -> str:
        """What instantiates it, under a name of its own."""
        return self.register.launch().instantiation.replace(
            f'"{self.register.kernel}"', f'"{self.host_name}"', 1
        )

    def entry(self, unit: Unit) -> str:
        """Its row of plan.inc."""
        r = self.register
        merge = f"merge_chunks_{r.dtype}" if unit.constants & SPLIT else ""
        return (
            f'{{"{self.host_name}", "{unit.name}", Kind::{KINDS[r.kernel]}, '
            f"Storage::{STORAGE_KINDS[r.dtype]}, {r.head_tile}, {r.value_tile}, {r.block_rows}, "
            f"{r.block}, {32 * r.simdgroups}, {unit.constants}, "
            f'{"true" if unit.fault else "false"}, "{merge}"}},\n'
        )


def make_unit(name: str, registers: list[Register], constants: int, **settings: object) -> Unit:
    instances = [Instance(register) for register in registers]
    made = Unit(name, shader_of(registers[0].kernel), [], constants=constants, **settings)  # type: ignore[arg-type]
    made.lines = [instance.line for instance in instances]
    made.entries = [instance.entry(made) for instance in instances]
    return made


def costed(kernel: str) -> list[Register]:
    """The instances that the cost model has."""
    return [
        Register(kernel, dim, dim, dtype, **settings)  # type: ignore[arg-type]
        for dim, rows in REGISTER.items()
        for name, dtype, settings in rows
        if name == kernel
    ]


def chosen(kernel: str) -> list[Register]:
    """The instances that the cost model has, and for bfloat16, where it has none, those of float32:
    what calls choose.
    """
    found = costed(kernel)
    wanted = [replace(r, dtype="bfloat16") for r in found if r.dtype == "float32"]
    return [*found, *(r for r in wanted if r not in found)]


def kernel_units(kernel: str) -> list[Unit]:
    base = small(kernel)
    options = SELECTS | OPTIONS.get(kernel, NEUTRAL | RAGGED)
    found = [
        make_unit(
            f"base_register_{kernel}", [small(kernel, dtype) for dtype in STORAGE_KINDS], SELECTS
        ),
        make_unit(f"options_register_{kernel}", [small(kernel, d) for d in STORAGE_KINDS], options),
    ]
    # One unit per size, because a unit compiles on one core.
    for dim in REGISTER:
        instances = [register for register in chosen(kernel) if register.head_tile == dim]
        if not instances:
            continue
        name = f"register_{kernel}_{dim}"
        found.append(make_unit(f"base_{name}", instances, SELECTS))
        found.append(make_unit(f"full_{name}", instances, FULL))
        found.append(make_unit(f"dropout_{name}", instances, FULL | DROPOUT))
    found += [make_unit(f"map{m}_register_{kernel}", [base], SELECTS, map=m) for m in (0, 3)]
    if kernel != "forward":
        found.append(make_unit(f"constant_register_{kernel}", [base], SELECTS | ACCUMULATE))
    return found


def split_units() -> list[Unit]:
    """Forward over chunks of keys; what merges them has no rows of its own in plan.inc."""
    merge = Unit("base_merge_chunks", "merge_chunks", [])
    merge.lines = [merge_launch(d, f"merge_chunks_{d}").instantiation for d in STORAGE_KINDS]
    registers = [replace(small("forward", d), simdgroups=n) for d in STORAGE_KINDS for n in (1, 4)]
    return [merge, make_unit("base_split", registers, SELECTS | SPLIT)]


def barrier_units() -> list[Unit]:
    """One unit per barrier; those of headers and of dK and dV in a kernel that has both."""
    shaders = {shader_of(kernel): kernel for kernel in ("forward", "backward_dq", "backward_dkv")}
    found = []
    for path in sorted([*SHADERS.glob("*.metal"), *SHADERS.glob("*.h")]):
        if not is_register_file(path) or path.name == "lane_map_probe.metal":
            continue
        text = path.read_text()
        kernel = shaders.get(path.stem, "forward")
        for number, match in enumerate(BARRIER.finditer(text), 1):
            if (path.name, number) in UNSEEN:
                continue
            changed = {path.name: text[: match.start()] + ";" + text[match.end() :]}
            # Sums of slopes have barriers of their own.
            slopes = OPTIONS["backward_dq"] if kernel == "backward_dq" else 0
            name = f"nobar_{path.stem}_{number}"
            settings = {"fault": True, "files": changed}
            # Without a vote on what is not finite, whose barrier could stand in for a loop's own;
            # two fragments, whose exchanges follow each other.
            selects = SELECTS if path.stem in ("register_finite", "register_dkv") else 0
            register = replace(small(kernel), row_fragments=2 if path.stem == "exchange" else 1)
            found.append(make_unit(name, [register], selects | slopes, **settings))
    return found


def register_units() -> list[Unit]:
    units = [made for kernel in KINDS for made in kernel_units(kernel)]
    return [*units, *split_units(), *barrier_units()]
