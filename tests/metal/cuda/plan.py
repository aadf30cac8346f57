"""Writes the units of the check program into a folder: `plan.py BUILD_FOLDER`, then `make -C
BUILD_FOLDER -j`.

Units: every kernel at the sizes that matter and in the three storage types (map 1, Apple's), the
float32 kernels under two more maps, and one unit per planted fault: each barrier of each shader
deleted, and reads out of bounds. The shaders are those of the working tree. The register kernels
and few rows with their keys in chunks are plan_register.py's.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

sys.path += [str(Path(__file__).resolve().parents[n]) for n in range(3)]

from msl_to_cuda import translate
from plan_register import register_units
from register_cases import is_register_file
from units import BARRIER, DROPOUT, IDS, NEUTRAL, RAGGED, ROOT, SHADERS, STORAGES, Unit

HERE = Path(__file__).resolve().parent
BLOCK_ROWS, BLOCK_COLUMNS, DELTA_ROWS, SUM_HEADS = 32, 16, 4, 4
KINDS = {
    "forward": "kForward",
    "delta": "kDelta",
    "backward_dq": "kBackwardDq",
    "backward_dv": "kBackwardDv",
    "backward_dk": "kBackwardDk",
    "mask_gradient": "kMaskGradient",
    "slope_gradient": "kSlopeGradient",
    "sink_gradient": "kSinkGradient",
}
BY_ROW = {"delta": DELTA_ROWS, "slope_gradient": SUM_HEADS, "sink_gradient": SUM_HEADS}
SUMS = ("slope_gradient", "sink_gradient")
OPTIONS = {
    "forward": NEUTRAL | RAGGED | 1 << IDS["HasSinks"],
    "backward_dq": NEUTRAL | RAGGED | 1 << IDS["SlopeGradient"],
    "backward_dv": NEUTRAL | RAGGED,
    "backward_dk": NEUTRAL | RAGGED,
    "mask_gradient": NEUTRAL,
}
SMALL = ("float", 32, 16)
SIZES = [SMALL, ("float", 64, 64), ("float", 128, 128), ("half", 64, 64), ("Bfloat16", 64, 64)]

# Faults besides deleted barriers: name, file, text, replacement. Every text must occur exactly
# once.
EDITS = [
    ("unchecked_rows", "tile.h", "if (r < valid_rows && d < dim) {", "if (d < dim) {"),
    ("unchecked_columns", "tile.h", "if (r < valid_rows && d < dim) {", "if (r < valid_rows) {"),
    ("unchecked_store", "tile.h", "if (r >= valid_rows || d >= dim) continue;", ""),
]


def host_name(shader: str, instance: tuple[str, int, int]) -> str:
    storage, head, value = instance
    name = f"{shader}_{STORAGES[storage][0]}"
    return name if shader in BY_ROW else f"{name}_d{head}_v{value}"


def instantiation(shader: str, instance: tuple[str, int, int]) -> str:
    storage, head, value = instance
    sizes = f"{head}, {value}, {BLOCK_ROWS}, {BLOCK_COLUMNS}"
    function = "delta_rows" if shader == "delta" else shader
    arguments = f"{storage}, {BY_ROW.get(shader, sizes)}"
    if shader in SUMS:
        arguments = str(SUM_HEADS)
    return f'FLASHATTN_INSTANTIATE("{host_name(shader, instance)}", {function}, {arguments})'


def barrier_units() -> list[Unit]:
    """One unit per barrier and shader that holds it; a barrier of a header is deleted for each
    shader that calls it.
    """
    units = []
    for path in sorted([*SHADERS.glob("*.metal"), *SHADERS.glob("*.h")]):
        if is_register_file(path):
            continue
        text = path.read_text()
        for number, match in enumerate(BARRIER.finditer(text), 1):
            changed = text[: match.start()] + ";" + text[match.end() :]
            shaders = [path.stem] if path.suffix == ".metal" else ["forward"]
            for shader in shaders:
                name = f"nobar_{path.stem}_{number}"
                constants = NEUTRAL if shader == "mask_gradient" else 0
                files = {path.name: changed}
                units.append(Unit(name, shader, [SMALL], 1, constants, fault=True, files=files))
    return units


def edit_units() -> list[Unit]:
    units = []
    for name, file, old, new in EDITS:
        text = (SHADERS / file).read_text()
        if text.count(old) != 1:
            raise SystemExit(f"plan: '{old}' occurs {text.count(old)} times in {file}")
        changed = {file: text.replace(old, new)}
        units.append(Unit(f"edit_{name}", "forward", [SMALL], fault=True, files=changed))
    return units


def plan() -> list[Unit]:
    units = []
    for shader in KINDS:
        if shader in SUMS:
            units.append(Unit(f"base_{shader}", shader, [SMALL]))
            continue
        if shader in OPTIONS:
            sizes = SIZES if shader == "mask_gradient" else [SMALL, *SIZES[-2:]]
            units.append(Unit(f"options_{shader}", shader, sizes, constants=OPTIONS[shader]))
            if shader != "mask_gradient":
                # Dropout that drops, of long.cu; one unit per size, which compiles on one core.
                units += [
                    Unit(f"dropout_{shader}_{number}", shader, [size], constants=DROPOUT)
                    for number, size in enumerate(SIZES[1:])
                ]
        if shader == "mask_gradient":
            continue
        sizes = [s for s in SIZES if s[1] == 64] if shader == "delta" else SIZES
        units.append(Unit(f"base_{shader}", shader, sizes))
        if shader != "forward":
            # Accumulating gradients, delta with dlse: the only constant each of them has.
            size = ("float", 64, 64)
            constants = 2 if shader == "delta" else 1
            units.append(Unit(f"constant_{shader}", shader, [size], constants=constants))
        if shader != "delta":
            units += [Unit(f"map{m}_{shader}", shader, [("float", 64, 64)], map=m) for m in (0, 3)]
    return [*units, *barrier_units(), *edit_units(), *register_units()]


def entry(unit: Unit, instance: tuple[str, int, int]) -> str:
    storage, head, value = instance
    rows = BY_ROW.get(unit.shader, BLOCK_ROWS)
    by_row = unit.shader in BY_ROW
    threads = rows * (32 if by_row else 4)
    tiles = "0, 0" if by_row else f"{head}, {value}"
    columns = 0 if by_row else BLOCK_COLUMNS
    return (
        f'{{"{host_name(unit.shader, instance)}", "{unit.name}", Kind::{KINDS[unit.shader]}, '
        f"Storage::{STORAGES[storage][1]}, {tiles}, {rows}, {columns}, {threads}, "
        f'{unit.constants}, {"true" if unit.fault else "false"}, ""}},\n'
    )


def write_unit(unit: Unit, folder: Path) -> None:
    include = SHADERS
    if unit.files:  # a whole folder: headers find each other beside themselves
        include = folder / "changed" / unit.name
        shutil.copytree(SHADERS, include, dirs_exist_ok=True)
        for name, text in unit.files.items():
            (include / name).write_text(text)
    file = f"{unit.shader}.metal"
    source = unit.files.get(file) or (SHADERS / file).read_text()
    own = [instantiation(unit.shader, instance) for instance in unit.instances]
    lines = "\n".join([*own, *unit.lines])
    settings = {"METAL_CUDA_MAP": str(unit.map), "METAL_CUDA_CONSTANTS": str(unit.constants)}
    program = f'{source}\n#line 1 "instantiations"\n{lines}\n'
    text = translate(program, file, [str(include)], unit.name, settings)
    (folder / f"{unit.name}.cu").write_text(text)


MAKEFILE = """NVCC ?= nvcc
ARCH ?= native
INCLUDES = -I{here} -I{root} -I{root}/cpp/src -I.
FLAGS = -O2 -std=c++17 -arch=$(ARCH) -lineinfo --expt-relaxed-constexpr $(INCLUDES)
FLAGS += -diag-suppress 177,550,186,39,179
OBJECTS = {objects} problem.o storage.o
HEADERS = $(wildcard {here}/*.h {here}/*.cuh) plan.inc
all: check long
check: check.o $(OBJECTS)
\t$(NVCC) -arch=$(ARCH) -o $@ $^ -lpthread
long: long.o plain_attention.o $(OBJECTS)
\t$(NVCC) -arch=$(ARCH) -o $@ $^ -lpthread
%.o: %.cu {here}/metal_shim.cuh {here}/registry.h
\t$(NVCC) $(FLAGS) -c -o $@ $<
check.o long.o plain_attention.o: %.o: {here}/%.cu $(HEADERS)
\t$(NVCC) $(FLAGS) -c -o $@ $<
problem.o storage.o: %.o: {here}/%.cpp $(HEADERS)
\tg++ -O3 -march=native -ffp-contract=off -std=c++17 $(INCLUDES) -c -o $@ $<
"""


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    units = plan()
    for unit in units:
        write_unit(unit, folder)
    entries = [entry(unit, instance) for unit in units for instance in unit.instances]
    entries += [line for unit in units for line in unit.entries]
    (folder / "plan.inc").write_text("".join(entries))
    (folder / "faults.txt").write_text("".join(f"{unit.name}\n" for unit in units if unit.fault))
    objects = " ".join(f"{unit.name}.o" for unit in units)
    here = (
        Path("../" * len(folder.relative_to(ROOT).parts)) if folder.is_relative_to(ROOT) else ROOT
    )
    makefile = MAKEFILE.format(here=here / HERE.relative_to(ROOT), root=here, objects=objects)
    (folder / "Makefile").write_text(makefile)
    print(f"{len(units)} units, {sum(unit.fault for unit in units)} of them with a planted fault")


if __name__ == "__main__":
    main()
