"""The recipes of docs/jax.md on four virtual devices, against one call on one device.

A process of its own: the number of devices is fixed when JAX starts.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import flashattn as fa
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, PartitionSpec

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "jax.md").read_text()


def assert_near(one: Any, other: Any) -> None:
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=4e-6)


def main() -> None:
    assert jax.device_count() == 4
    recipes: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL):
        exec(compile(block, "docs/jax.md", "exec"), recipes)
    rng = np.random.default_rng(0)
    shape = (2, 64, 8, 16)
    q, k, v, weight = (jnp.asarray(rng.standard_normal(shape, np.float32)) for _ in range(4))

    def whole(q: Any, k: Any, v: Any, **options: Any) -> Any:
        return fa.attention(q, k, v, causal=True, **options)

    def gradients(call: Any) -> Any:
        return jax.grad(lambda *x: (call(*x) * weight).sum(), argnums=(0, 1, 2))(q, k, v)

    seed = jax.random.key(3)
    dropped = {"dropout_p": 0.1, "dropout_seed": seed}
    np.testing.assert_array_equal(recipes["heads"](q, k, v, seed), whole(q, k, v, **dropped))
    for one, other in zip(
        gradients(lambda *x: recipes["heads"](*x, seed)),
        gradients(lambda *x: whole(*x, **dropped)),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    for recipe in recipes["rows"]:
        assert recipe(q, k, v).sharding.num_devices == 4
        assert_near(recipe(q, k, v), whole(q, k, v))
        assert_near(gradients(recipe), gradients(whole))
    replicated_options(q, k, v, weight)
    partitioned_by_xla(recipes["mesh"], q, k, v)
    print("done")


def replicated_options(q: Any, k: Any, v: Any, weight: Any) -> None:
    """The gradient of an option that every device shares is summed over them; two mesh axes."""
    mesh = jax.make_mesh((2, 2), ("batch", "heads"), axis_types=(AxisType.Auto,) * 2)
    spec = PartitionSpec("batch", None, "heads")
    mask = jnp.asarray(np.random.default_rng(1).standard_normal((64, 64), np.float32))

    def loss(attend: Any, q: Any, mask: Any, sinks: Any) -> Any:
        return (attend(q, mask, sinks) * weight).sum()

    def whole(q: Any, mask: Any, sinks: Any) -> Any:
        return fa.attention(q, k, v, mask=mask, sinks=sinks)

    def local(q: Any, k: Any, v: Any, mask: Any, sinks: Any) -> Any:
        return fa.attention(q, k, v, mask=mask, sinks=sinks)

    specs = (spec, spec, spec, PartitionSpec(), PartitionSpec("heads"))
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec)
    sinks = jnp.linspace(-1.0, 1.0, 8)
    found = jax.jit(jax.grad(loss, argnums=(1, 2, 3)), static_argnums=0)
    assert_near(
        found(lambda q, *options: sharded(q, k, v, *options), q, mask, sinks),
        found(whole, q, mask, sinks),
    )


def partitioned_by_xla(mesh: Any, q: Any, k: Any, v: Any) -> None:
    """Without shard_map: right, by gathering."""
    spec = jax.sharding.NamedSharding(mesh, PartitionSpec(None, None, "devices"))
    placed = [jax.device_put(x, spec) for x in (q, k, v)]
    out = jax.jit(fa.attention)(*placed)
    np.testing.assert_array_equal(out, fa.attention(q, k, v))


if __name__ == "__main__":
    main()
