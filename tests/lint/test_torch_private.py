"""torch's private names are used in one file of the package, and one for benchmarks and tests; the
lint finds them in every other file."""

from pathlib import Path

from torch_names import Source, private_uses, read_sources

from raypp.stages.pipeline.planned_stage import PlannedStage

ROOT = Path(__file__).parents[2]
HOME = "raypp.torch_private"
HOMES = (HOME, "benchmarks.torch_private")


def project() -> list[Source]:
    return read_sources(ROOT, ("raypp", "tests", "benchmarks", "cluster"))


def uses_in(text: str, module: str = "raypp.stages.pipeline.planted") -> list[str]:
    return [use.name for use in private_uses(Source.of(module, text), project())]


def test_no_other_file_names_a_private_name_of_torch() -> None:
    assert {source.module for source in project()} >= {HOME, "raypp.stages.pipeline.runtime", "benchmarks.run"}
    found = [
        f"{source.module}, line {use.line}: {use.name}"
        for source in project()
        if source.module not in (*HOMES, "tests.lint.test_torch_private")
        for use in private_uses(source, project())
    ]
    assert not found, f"these belong into {HOME}"


def test_the_lint_finds_those_that_stand_where_they_may() -> None:
    (home,) = (source for source in project() if source.module == HOME)
    found = {use.name.rpartition(".")[2].rpartition(" ")[2] for use in private_uses(home, project())}
    assert {"_Action", "_add_reduce_grad", "_foreach_norm", "_world", "_get_backend"} <= found
    assert "aten::_grouped_mm" in found
    overridden = {use.name for use in private_uses(home, project()) if " of " in use.name}
    assert "ChunkStage._retrieve_recv_grads of torch.distributed.pipelining.PipelineStage" in overridden


def test_planted_names_hooks_and_attributes_of_classes_of_torchs_are_found() -> None:
    planted = [
        ("from torch.distributed.fsdp import _fully_shard", "torch.distributed.fsdp._fully_shard"),
        ("import torch._dynamo", "torch._dynamo"),
        ("from torch import _C", "torch._C"),
        ("from torch.distributed.tensor._utils import anything", "torch.distributed.tensor._utils.anything"),
        ("import torch\ntorch._foreach_norm([])", "torch._foreach_norm"),
        ("import torch\ntorch._C._cuda_init()", "torch._C._cuda_init"),
        ("import torch.distributed as dist\nw = dist.c10d._world.pg_map", "torch.distributed.c10d._world"),
        ("from torch.nn import functional as F\nF._verify_batch_size([])", "torch.nn.functional._verify_batch_size"),
        ("def f(weight):\n    return weight._local_tensor", "weight._local_tensor"),
        ("def f(module):\n    return module._get_fsdp_state()", "module._get_fsdp_state"),
        ("class A:\n    def f(self):\n        self.stage._stage_meta = None", "self.stage._stage_meta"),
        ("def f(x):\n    return getattr(x, '_spec', None)", "x._spec"),
        ("import torch\ng = getattr(torch, '_grouped_mm', None)", "torch._grouped_mm"),
        ("def test(monkeypatch, x):\n    monkeypatch.setattr(x, '_spec', 1)", "x._spec"),
        ("import importlib\nimportlib.import_module('torch._inductor.config')", "torch._inductor.config"),
        ("KEPT = {'aten::_flash_attention'}", "aten::_flash_attention"),
        (
            "from torch.distributed.pipelining import PipelineStage\n"
            "class Mine(PipelineStage):\n    def _retrieve_recv_grads(self, i): ...",
            "Mine._retrieve_recv_grads of torch.distributed.pipelining.PipelineStage",
        ),
        (
            f"from {PlannedStage.__module__} import PlannedStage\n"
            "class Mine(PlannedStage):\n    def f(self):\n        return self._has_backward",
            "Mine._has_backward of torch.distributed.pipelining.PipelineStage",
        ),
        (
            "from torch import nn\nclass Mine(nn.Module):\n    def f(self):\n        return self._parameters",
            "Mine._parameters of torch.nn.Module",
        ),
        (
            "import torch\nclass Base(torch.optim.SGD): ...\nclass Mine(Base):\n    def _init_group(self): ...",
            "Mine._init_group of torch.optim.SGD",
        ),
        (
            "from torch import nn\nclass Mine(nn.Module):\n    _version = 3",
            "Mine._version of torch.nn.Module",
        ),
    ]  # fmt: skip
    assert not [name for text, name in planted if name not in uses_in(text)]


def test_a_test_may_look_into_the_project_but_not_into_torch() -> None:
    text = "def test(stage):\n    assert stage._formats\n    assert stage._local_tensor is None"
    assert uses_in(text, "tests.unit.planted") == ["stage._local_tensor"]
