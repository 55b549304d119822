"""The operators besides attention: what they compute, and what they refuse."""

import re
import subprocess
import sys

import pytest
import torch

from kvstrata import kernels

ops = torch.ops.kvstrata


def test_rms_norm_scales_to_unit_root_mean_square() -> None:
    x, weight = torch.randn(5, 3, 8), torch.randn(8)
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    torch.testing.assert_close(ops.rms_norm(x, weight, 1e-6).double(), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_gated_activation_multiplies_without_changing_its_inputs(kind: str) -> None:
    gate, up = torch.randn(4, 12).chunk(2, dim=1)
    before = gate.clone(), up.clone()
    inner = (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    active = gate * torch.sigmoid(gate) if kind == "silu" else 0.5 * gate * (1 + torch.tanh(inner))
    torch.testing.assert_close(ops.gated_activation(gate, up, kind), active * up)
    assert torch.equal(gate, before[0])
    assert torch.equal(up, before[1])


def test_rope_rotates_pairs_half_a_head_apart() -> None:
    x, angles = torch.randn(5, 3, 8), torch.rand(5, 4) * 6
    turned = torch.view_as_complex(torch.stack((x[..., :4], x[..., 4:]), -1)) * torch.polar(
        torch.ones(5, 1, 4), angles[:, None]
    )
    expected = torch.cat((turned.real, turned.imag), -1)
    torch.testing.assert_close(ops.rope(x, angles.cos(), angles.sin()), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_write_kv_fills_exactly_the_given_slots(dtype: torch.dtype) -> None:
    kv = torch.full((5, 3, 2, 2, 4, 8), torch.nan, dtype=dtype)
    key, value = torch.randn(3, 2, 8), torch.randn(3, 2, 8)
    ops.write_kv(kv, 1, key, value, torch.tensor([19, 0, 6]))
    for token, (block, offset) in enumerate([(4, 3), (0, 0), (1, 2)]):
        assert torch.equal(kv[block, 1, 0, :, offset], key[token].to(dtype))
        assert torch.equal(kv[block, 1, 1, :, offset], value[token].to(dtype))
    assert (~kv.isnan()).sum() == 3 * 2 * 2 * 8


def test_write_kv_of_no_tokens_changes_nothing() -> None:
    kv = torch.zeros(2, 1, 2, 2, 4, 8)
    ops.write_kv(kv, 0, torch.ones(0, 2, 8), torch.ones(0, 2, 8), torch.ones(0, dtype=torch.int64))
    assert kv.count_nonzero() == 0


@pytest.mark.parametrize("slot", [-1, 8])
def test_write_kv_refuses_slots_outside_the_pool(slot: int) -> None:
    kv = torch.zeros(2, 1, 2, 2, 4, 8)
    with pytest.raises(ValueError, match=re.escape(f"slots are {slot} to {slot}, expected 0 to 7")):
        ops.write_kv(kv, 0, torch.ones(1, 2, 8), torch.ones(1, 2, 8), torch.tensor([slot]))
    assert kv.count_nonzero() == 0


KV = torch.zeros(2, 1, 2, 2, 4, 8)
TOKENS = torch.zeros(3, 2, 8)
SLOTS = torch.arange(3)


@pytest.mark.parametrize(
    ("operator", "arguments", "message"),
    [
        ("rms_norm", (torch.ones(2, 8), torch.ones(4), 1e-6), "weight has shape [4], expected [8]"),
        ("rms_norm", (torch.ones(2, 8).half(), torch.ones(8), 1e-6), "x has dtype torch.float16, expected"),
        (
            "gated_activation",
            (torch.ones(2, 8), torch.ones(2, 4), "silu"),
            "up has shape [2, 4], expected [2, 8]",
        ),
        (
            "gated_activation",
            (torch.ones(2, 8), torch.ones(2, 8), "relu"),
            "kind is 'relu', expected one of silu",
        ),
        ("rope", (TOKENS, torch.ones(3, 8), torch.ones(3, 4)), "cos has shape [3, 8], expected [3, 4]"),
        ("rope", (TOKENS, torch.ones(3, 4), torch.ones(2, 4)), "sin has shape [2, 4], expected [3, 4]"),
        (
            "rope",
            (torch.ones(3, 2, 7), torch.ones(3, 3), torch.ones(3, 3)),
            "x has head_dim 7, expected an even",
        ),
        (
            "rope",
            (torch.ones(3, 8), torch.ones(3, 4), torch.ones(3, 4)),
            "x has shape [3, 8], expected [num_tokens,",
        ),
        ("write_kv", (KV, 0, TOKENS, TOKENS[:2], SLOTS), "value has shape [2, 2, 8], expected [3, 2, 8]"),
        (
            "write_kv",
            (KV, 0, TOKENS.half(), TOKENS, SLOTS),
            "key has dtype torch.float16, expected torch.float32",
        ),
        ("write_kv", (KV, 0, TOKENS, TOKENS, SLOTS[:2]), "slots has shape [2], expected [3]"),
        (
            "write_kv",
            (KV, 0, TOKENS, TOKENS, SLOTS.int()),
            "slots has dtype torch.int32, expected torch.int64",
        ),
        ("write_kv", (KV, 1, TOKENS, TOKENS, SLOTS), "layer is 1, expected 0 to 0"),
        (
            "write_kv",
            (KV[0], 0, TOKENS, TOKENS, SLOTS),
            "kv has shape [1, 2, 2, 4, 8], expected [num_blocks,",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_named(operator: str, arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{operator}: {message}")):
        getattr(ops, operator)(*arguments)


def test_arithmetic_version_names_backend_and_torch() -> None:
    release = ".".join(torch.__version__.split("+")[0].split(".")[:2])
    assert re.fullmatch(rf"(native|reference)-\d+/torch-{re.escape(release)}", kernels.arithmetic_version())


def test_operators_exist_after_importing_the_package_alone() -> None:
    code = "import kvstrata.kernels, torch; torch.ops.kvstrata.rms_norm(torch.ones(1, 2), torch.ones(2), 0.0)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
