"""The C++ appended to a translated program: one thunk per host name, the kernel and constant
tables, the entry point.
"""

from __future__ import annotations

from kernels import Instance, Kernel, Parameter, Program
from tokens import TranslationError

# metal_sim::ArgumentKind; position parameters are no arguments of the host.
_KINDS = {"buffer": 0, "constant": 1, "threadgroup": 2, "position": -1, "index": -1}


def call_argument(parameter: Parameter) -> str:
    if parameter.kind == "position":
        return f"metal_sim::PositionArgument{{invocation.position->{parameter.index}}}"
    if parameter.kind == "index":
        return f"metal_sim::IndexArgument{{invocation.position->{parameter.index}}}"
    table = "threadgroup_memory" if parameter.kind == "threadgroup" else "buffers"
    adaptor = "ReferenceArgument" if parameter.is_reference else "PointerArgument"
    return f"metal_sim::{adaptor}{{invocation.{table}[{parameter.index}]}}"


def argument_spec(parameter: Parameter, constants: dict[str, str]) -> str:
    """`constants`: the index of each function constant, by name."""
    kind = _KINDS[parameter.kind]
    index = f"uint32_t({parameter.index})" if kind >= 0 else "0"
    reference = "true" if parameter.is_reference else "false"
    if parameter.condition and parameter.condition not in constants:
        raise TranslationError(f"{parameter.name}: {parameter.condition} is no function constant")
    condition = constants.get(parameter.condition, "-1")
    return f'{{{kind}, {index}, false, {reference}, 0, "{parameter.name}", {condition}}}'


def instance_text(
    number: int, instance: Instance, kernel: Kernel, constants: dict[str, str]
) -> str:
    function = f"{instance.function}{instance.arguments}"
    call = ", ".join(call_argument(parameter) for parameter in kernel.parameters)
    specs = ", ".join(argument_spec(parameter, constants) for parameter in kernel.parameters)
    count = len(kernel.parameters)
    thunk = f"METAL_SIM_THUNK void invoke_{number}(const abi::Invocation& invocation)"
    text = f"{thunk} {{ ::{function}({call}); }}\n"
    text += f"static constexpr abi::ArgumentSpec specs_{number}[{count}] = {{{specs}}};\n"
    value = f"argument_list(&::{function}, specs_{number})"
    text += f"static constexpr auto arguments_{number} = {value};\n"
    return text


def limits_text(kernel: Kernel) -> str:
    if not kernel.max_threads:
        return ""
    header = f"{kernel.template_header} " if kernel.template_header else ""
    function = f"constexpr uint32_t max_threads_{kernel.name}()"
    return f"{header}{function} {{ return {kernel.max_threads}; }}\n"


def kernel_row(number: int, instance: Instance, kernel: Kernel) -> str:
    limit = f"max_threads_{kernel.name}{instance.arguments}()" if kernel.max_threads else "0"
    return (
        f'{{"{instance.host_name}", invoke_{number}, arguments_{number}.spec, '
        f"arguments_{number}.size, {limit}}}"
    )


def tables(program: Program) -> str:
    """Text to append. Raises when an instance names a kernel the program does not define."""
    text = '\n# 1 "metal_sim_tables"\nnamespace metal_sim {\nusing namespace metal;\n'
    for kernel in program.kernels.values():
        text += limits_text(kernel)
    rows = []
    indices = {name: index for index, _, name in program.constants}
    for number, instance in enumerate(program.instances):
        kernel = program.kernels.get(instance.function)
        if kernel is None:
            raise TranslationError(f"{instance.host_name}: no kernel named {instance.function}")
        text += instance_text(number, instance, kernel, indices)
        rows.append(kernel_row(number, instance, kernel))
    constants = [
        f'{{uint32_t({index}), "{name}", sizeof({kind})}}'
        for index, kind, name in program.constants
    ]
    text += f"static const abi::KernelSpec kernels[] = {{{', '.join([*rows, '{}'])}}};\n"
    text += f"static const abi::ConstantSpec constants[] = {{{', '.join([*constants, '{}'])}}};\n"
    text += (
        f"static const abi::Module module{{abi::kVersion, kernels, {len(rows)}, constants, "
        f"{len(constants)}}};\n}}\n"
        "METAL_SIM_ENTRY const metal_sim::abi::Module* "
        "metal_sim_module(const metal_sim::abi::Runtime* runtime) {\n"
        "  metal_sim::runtime = runtime;\n  return &metal_sim::module;\n}\n"
    )
    return text
