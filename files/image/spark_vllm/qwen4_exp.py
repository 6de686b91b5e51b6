"""Qwen4Exp (Qwen3.8-Flash-Next) with tables in files and quantized heads."""

# The engine starts the lookup before the layer in front of the one that needs the rows. A host
# function in a second stream reads them, so the GPU computes that layer meanwhile, the scheduler
# does not wait, and CUDA graphs hold the lookup like every other step.

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import vllm.models.qwen4_exp.nvidia.ngram_embedding as ngram_embedding
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.config import VllmConfig
from vllm.logger import init_logger
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead
from vllm.model_executor.models.utils import PPMissingLayer, extract_layer_index, maybe_prefix
from vllm.models.qwen4_exp.common.ngram_embedding import (
    Qwen4ExpPLEEmbedding,
    Qwen4ExpPLEUnquantizedEmbeddingMethod,
)
from vllm.models.qwen4_exp.nvidia.hyperconnection import GatedResidual
from vllm.models.qwen4_exp.nvidia.model import Qwen4ExpForConditionalGeneration
from vllm.models.qwen4_exp.nvidia.model_state import Qwen4ExpModelState
from vllm.models.qwen4_exp.nvidia.mtp import Qwen4ExpMTP

from spark_vllm.ngram_table import (
    GROUP,
    Header,
    Ids,
    Table,
    TableOptions,
    compute_next_ids,
    read_table_options,
    table_path,
)

# Below "vllm.", because vLLM gives handlers only to its own logger.
logger = init_logger("vllm.spark_vllm.ngram")

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_HostFunction = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


class SparkQwen4Exp(Qwen4ExpForConditionalGeneration):
    """Builds the head with a quantization method, unlike the engine's class."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "model") -> None:
        with tables_in_files(vllm_config):
            super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = vllm_config.model_config.hf_text_config
        self.language_model.lm_head = None  # Free the memory before the next line allocates.
        self.language_model.lm_head = ParallelLMHead(
            config.vocab_size,
            config.hidden_size,
            quant_config=vllm_config.quant_config,
            prefix=maybe_prefix(prefix, "language_model.lm_head"),
        )
        clear_padding(self)

    @staticmethod
    def get_model_state_cls() -> type[Qwen4ExpModelState]:
        return ReadAheadState


class ReadAheadState(Qwen4ExpModelState):
    """Also requests the rows of a prompt's next part, while the engine computes this part."""

    def __init__(self, vllm_config: VllmConfig, model: torch.nn.Module, *more: Any) -> None:
        super().__init__(vllm_config, model, *more)
        self._prompts: dict[int, Ids] = {}
        self._thread = ThreadPoolExecutor(1, "spark-read-ahead")
        self._tables = [
            (module.ngram_embedding.table, hash_parts(module))
            for module in model.modules()
            if isinstance(getattr(module, "ngram_embedding", None), FileEmbedding)
        ]

    def add_request(self, req_index: int, new_req_data: Any) -> None:
        super().add_request(req_index, new_req_data)
        tokens = new_req_data.prefill_token_ids
        self._prompts[req_index] = torch.tensor(tokens, dtype=torch.int64, device="cpu").numpy()

    def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
        starts, counts = input_batch.num_computed_tokens_np, input_batch.num_scheduled_tokens
        for index, start, end in zip(
            input_batch.idx_mapping_np, starts, starts + counts, strict=True
        ):
            prompt = self._prompts.get(index)
            if prompt is not None and end < len(prompt):
                self._thread.submit(self._request, prompt, start, end)
        return super().prepare_inputs(input_batch, req_states)

    def _request(self, prompt: Ids, start: int, end: int) -> None:
        try:
            for table, parts in self._tables:
                table.request(compute_next_ids(prompt, start, end, *parts))
        except Exception as error:  # this only costs time: the engine reads the rows later
            logger.warning_once("spark: n-gram rows are not read ahead: %s", error)


def hash_parts(ngram: torch.nn.Module) -> list[Ids]:
    names = ("layer_multipliers", "ngram_heads_vocab_sizes", "ngram_heads_offsets")
    return [getattr(ngram, name).cpu().numpy() for name in names]


class SparkQwen4ExpMTP(Qwen4ExpMTP):
    """A drafter without a head; the engine gives it the target's head, which may be quantized."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.lm_head = PPMissingLayer()
        clear_padding(self)


def clear_padding(model: torch.nn.Module) -> None:
    """Zero the padding rows of mixers: checkpoints lack them, but finite.py checks them."""
    for module in model.modules():
        if isinstance(module, GatedResidual) and module.pad_size:
            module.input_mix_weight_down_block_inject.weight.data[-module.pad_size :].zero_()


@contextmanager
def tables_in_files(vllm_config: VllmConfig) -> Iterator[None]:
    """Make models that are built in this context read tables from files if the options say so."""
    options = read_table_options(vllm_config.additional_config, vllm_config.model_config.model)
    if options is None:
        yield
        return
    file_embedding = functools.partial(FileEmbedding, options=options)
    with (
        mock.patch.object(ngram_embedding, "Qwen4ExpPLEDeviceEmbedding", file_embedding),
        mock.patch.object(ngram_embedding, "Qwen4ExpPLEPinnedHostEmbedding", file_embedding),
    ):
        yield


class FileEmbedding(Qwen4ExpPLEEmbedding):
    """Reads all rows on every rank from the file on its host."""

    supports_prefetch = True

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        options: TableOptions,
        params_dtype: torch.dtype,
        padding_size: int,
        prefix: str,
        embedding_method: object,
        num_ngram_heads: int = 1,
        max_total_tokens: int = 0,
        data_parallel_rank: int = 0,
        reduce_results: bool = True,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype=params_dtype,
            padding_size=padding_size,
            prefix=prefix,
            embedding_method=Qwen4ExpPLEUnquantizedEmbeddingMethod(),
            data_parallel_rank=data_parallel_rank,
            reduce_results=reduce_results,
        )
        if not reduce_results or self.etp_data_parallel_size > 1:
            raise ValueError(
                "--additional-config: spark.ngram_table: 'file' does not work with "
                "sequence-parallel hyper-connections or embedding_across_dp; fix: disable both"
            )
        path = table_path(options.directory, extract_layer_index(prefix))
        self.table = Table(path, options.cache_bytes)
        header = self.table.header
        if (header.rows, header.width) != (num_embeddings, embedding_dim):
            raise ValueError(
                f"{path}: has {header.rows} rows of {header.width} numbers, "
                f"but config.json needs {num_embeddings} rows of {embedding_dim} numbers; "
                "fix: build the checkpoint again"
            )
        shape = (max_total_tokens, num_ngram_heads)
        ids = torch.empty(shape, dtype=torch.int64, device="cpu", pin_memory=True)
        rows = torch.empty(
            (*shape, header.row_bytes), dtype=torch.uint8, device="cpu", pin_memory=True
        )
        self._ids, self._rows = ids, rows
        self._device_rows = torch.empty_like(rows, device=torch.get_default_device())
        self._e2m1 = torch.tensor([*_E2M1, *(-number for number in _E2M1)], dtype=torch.float32)
        self._stream = torch.cuda.Stream()
        self._functions: dict[int, Callable[..., None]] = {}
        logger.info(
            "spark: n-gram table of %d rows from 1 file, %s", header.rows, header.number_format
        )

    def allocate_embedding_weight(
        self, num_embeddings: int, embedding_dim: int, dtype: torch.dtype
    ) -> torch.Tensor:
        return torch.empty(0, embedding_dim, dtype=dtype)

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def start_prefetch(self, ngram_ids: torch.Tensor) -> None:
        count = ngram_ids.shape[0]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._ids[:count].copy_(ngram_ids, non_blocking=True)
            launch_host_function(self._stream, self._host_function(count))
            self._device_rows[:count].copy_(self._rows[:count], non_blocking=True)

    def finalize_prefetch(self, total_tokens: int) -> torch.Tensor:
        rows = self._device_rows.new_empty((total_tokens, self._device_rows[0].numel()))
        self._wait_for_rows(rows)
        return rows

    @eager_break_during_capture  # type: ignore[untyped-decorator]
    def _wait_for_rows(self, output: torch.Tensor) -> None:
        torch.cuda.current_stream().wait_stream(self._stream)
        output.copy_(self._device_rows[: len(output)].flatten(1))

    def dequantize(self, embeddings: torch.Tensor, output_dtype: torch.dtype) -> torch.Tensor:
        return dequantize_rows(embeddings, self.table.header, self._e2m1, output_dtype)

    def _host_function(self, count: int) -> Callable[..., None]:
        """Return the function that reads ``count`` tokens' rows; CUDA graphs keep its address."""
        if count not in self._functions:
            ids = self._ids[:count].flatten().numpy()
            rows = self._rows[:count].flatten(0, 1).numpy()

            def read_rows(_: object) -> None:
                try:
                    self.table.lookup(ids, rows)
                except BaseException as error:  # The GPU must not compute with stale rows.
                    os.write(2, f"spark: stopping the engine: {error}\n".encode())
                    os._exit(1)

            self._functions[count] = _HostFunction(read_rows)
        return self._functions[count]


def launch_host_function(stream: torch.cuda.Stream, function: Callable[..., None]) -> None:
    """Call ``function`` on the host after all earlier work in the stream."""
    driver = ctypes.CDLL("libcuda.so.1")
    status = driver.cuLaunchHostFunc(ctypes.c_void_p(stream.cuda_stream), function, None)
    if status:
        raise RuntimeError(f"cuLaunchHostFunc returned the error {status}")


def dequantize_rows(
    rows: torch.Tensor, header: Header, e2m1: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the numbers in adjacent rows, rounded as the engine does for its own formats."""
    rows = rows.unflatten(-1, (-1, header.row_bytes))
    if header.number_format == "e4m3":
        scale = torch.tensor(header.scale, dtype=dtype, device="cpu").item()
        return (rows.view(torch.float8_e4m3fn).to(dtype) * scale).flatten(-2)
    codes, scales = rows.split((header.width // 2, header.width // GROUP), dim=-1)
    numbers = e2m1[torch.stack((codes & 15, codes >> 4), dim=-1).int()]
    groups = numbers.reshape(*rows.shape[:-1], -1, GROUP)
    factors = scales.contiguous().view(torch.float8_e4m3fn).float().unsqueeze(-1)
    return (groups * factors * header.scale).to(dtype).flatten(-3)
