# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from support.fresh_process import in_fresh_process

from adaptra_megatron.tools.local_ranks.launch_ranks import rank_environment
from testing.megatron.cuda_names import torch_names
from testing.megatron.megatron_on_cpu import MegatronOnCpuError, cpu_megatron, install, is_installed
from testing.replacing import Replaced, Replacement

OWNERS: list[Any] = [torch, torch.cuda, torch.cuda.random, torch.cuda.nvtx, torch.Tensor, torch.nn.Module, dist, c10d]


def names() -> list[dict[str, Any]]:
    return [dict(vars(owner)) for owner in OWNERS]


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], env=rank_environment({}), capture_output=True, text=True, timeout=120
    )


@in_fresh_process
def test_undo_puts_every_name_back() -> None:
    with cpu_megatron():  # a first time, so that modules imported on the way, and what they export, are there before
        pass
    before, environment, threads = names(), dict(os.environ), torch.get_num_threads()
    with cpu_megatron(threads=1) as installation:
        pairs = zip(names_by_id(names()), names_by_id(before), strict=True)
        replaced = sum(len(now.items() - then.items()) for now, then in pairs)
        assert replaced >= 60
        assert len(installation.replacements) >= replaced
        assert torch.get_num_threads() == 1
        assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
        torch.set_num_threads(2)
    assert names_by_id(names()) == names_by_id(before)
    assert torch.get_num_threads() == threads
    assert dict(os.environ) == environment
    assert not is_installed()


def names_by_id(found: list[dict[str, Any]]) -> list[dict[str, int]]:
    return [{name: id(value) for name, value in owner.items()} for owner in found]


def test_every_replacement_has_a_reason_and_an_owner_under_test() -> None:
    for replacement in torch_names():
        assert len(replacement.reason) > 10, str(replacement)
        assert any(replacement.owner is owner for owner in OWNERS), str(replacement)


@in_fresh_process
def test_installing_twice_is_refused_but_install_returns_the_one_in_force() -> None:
    with cpu_megatron() as installation:
        with pytest.raises(MegatronOnCpuError, match="undo the first"):
            cpu_megatron()
        assert install() is installation
        with pytest.raises(MegatronOnCpuError, match="without the fused weight gradient"):
            install(with_fused_weight_gradient=True)


def test_megatron_imported_too_early_is_refused() -> None:
    done = run_python(
        "import megatron.core.tensor_parallel\n"
        "from testing.megatron.megatron_on_cpu import cpu_megatron\n"
        "cpu_megatron()"
    )
    assert done.returncode == 1
    assert "MegatronOnCpuError: megatron.core was imported before" in done.stderr


def test_cuda_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(MegatronOnCpuError, match="this machine has CUDA"):
        cpu_megatron()


def test_groups_have_one_worker_thread() -> None:
    program = """
from testing.megatron.megatron_on_cpu import cpu_megatron
with cpu_megatron():
    import os, tempfile, torch, torch.distributed as dist
    def threads():
        return len(os.listdir("/proc/self/task"))
    before, file = threads(), tempfile.NamedTemporaryFile()
    dist.init_process_group("nccl", init_method=f"file://{file.name}", rank=0, world_size=1)
    assert threads() == before + 2, "gloo's loop over sockets, and one worker"
    group = dist.new_group([0], backend="gloo")
    assert threads() == before + 4
    ones = torch.ones(3)
    dist.all_reduce(ones, group=group)
    assert ones.sum() == 3
    del group  # its worker is joined: one that releases a tensor as Python ends aborts the process
    dist.destroy_process_group()
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_fused_weight_gradient_accumulates() -> None:
    program = """
from testing.megatron.megatron_on_cpu import cpu_megatron
with cpu_megatron(with_fused_weight_gradient=True):
    import torch
    from megatron.core.tensor_parallel import layers
    assert layers._grad_accum_fusion_available
    main_grad = torch.ones(3, 2)
    layers.fused_weight_gradient_mlp_cuda.wgrad_gemm_accum_fp32(torch.ones(4, 2), torch.ones(4, 3), main_grad)
    assert torch.equal(main_grad, torch.full((3, 2), 5.0)), main_grad
import sys
assert "fused_weight_gradient_mlp_cuda" not in sys.modules
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr


def test_failed_replacement_undoes_the_ones_before() -> None:
    class Owner:
        first = 1

    with pytest.raises(TypeError):
        Replaced([Replacement(Owner, "first", 2, "a test"), Replacement(int, "real", 2, "cannot be set")])
    assert Owner.first == 1


def test_names_that_are_absent_are_refused_unless_they_may_be() -> None:
    class Owner:
        pass

    with pytest.raises(AttributeError, match="moved"):
        Replaced([Replacement(Owner, "moved", 1, "a test")])
    assert not hasattr(Owner, "moved")
    with Replaced([Replacement(Owner, "new", 1, "a test", may_be_absent=True)]):
        assert Owner.new == 1  # type: ignore[attr-defined]
    assert not hasattr(Owner, "new")
