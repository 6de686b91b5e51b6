"""The plugin's and the stock TurboQuant backend, on an attention layer.

The reference is attention in torch over keys and values dequantized from the same cache slots, so
only kernel rounding remains. The plugin must pass and the stock backend must fail every check; when
it no longer fails, upstream is fixed.
"""

import pytest

pytest.importorskip("vllm")

import torch

from proofs import result_files
from proofs.kernels.caches import dequantize_slots, open_backend

HEADS, KV_HEADS, SIZE, BLOCK = 8, 2, 128, 16
PRESETS = ("turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc")
ROUNDING = 0.01
DAMAGE = 10 * ROUNDING


class Batch:
    """An attention layer with a filled cache: a fresh prompt, a continuation, a verify row."""

    def __init__(self, own, preset, monkeypatch, cached=(0, 24, 20), new=(40, 8, 3)):
        from vllm.v1.attention.backends import turboquant_attn as stock

        self.cached, self.new, self.own = cached, new, own
        longest = max(c + n for c, n in zip(cached, new, strict=True))
        self.metadata_type = stock.TurboQuantMetadata
        self.impl = open_backend(
            monkeypatch.setattr, own, preset, (HEADS, KV_HEADS, SIZE), longest + BLOCK
        )
        self.layer = torch.nn.Module()
        torch.manual_seed(0)
        blocks = -(-longest // BLOCK)
        slot = self.impl.tq_config.slot_size_aligned
        shape = (len(new) * blocks, BLOCK, KV_HEADS, slot)
        self.store = torch.zeros(shape, dtype=torch.uint8, device="cuda")
        self.cache = self.store.transpose(1, 2)
        numbers = torch.arange(len(new) * blocks, dtype=torch.int32, device="cuda")
        self.table = numbers.view(len(new), blocks)
        self.keys, self.values, self.queries = [], [], []
        for request, (before, fresh) in enumerate(zip(cached, new, strict=True)):
            for tensors, heads, tokens in (
                (self.keys, KV_HEADS, before + fresh),
                (self.values, KV_HEADS, before + fresh),
                (self.queries, HEADS, fresh),
            ):
                tensors.append(torch.randn(tokens, heads, SIZE, device="cuda").bfloat16())
            key, value = self.keys[request], self.values[request]
            slots = self.table[request, 0] * BLOCK + torch.arange(len(key), device="cuda")
            self.impl.do_kv_cache_update(self.layer, key, value, self.cache, slots.long())

    def run(self, order, cpu_lengths=None):
        metadata = self.metadata(order, cpu_lengths)
        return list(self.forward(order, metadata).split([self.new[r] for r in order]))

    def forward(self, order, metadata):
        query = torch.cat([self.queries[r] for r in order])
        key = torch.cat([self.keys[r][self.cached[r] :] for r in order])
        value = torch.cat([self.values[r][self.cached[r] :] for r in order])
        out = torch.zeros((len(query), HEADS * SIZE), dtype=query.dtype, device="cuda")
        self.impl.forward(self.layer, query, key, value, self.cache, metadata, out)
        return out.view(len(query), HEADS, SIZE)

    def metadata(self, order, cpu_lengths=None):
        """Describe the batch as the builder does; the plugin treats short rows as decodes."""
        new = torch.tensor([self.new[r] for r in order], dtype=torch.int32)
        lengths = torch.tensor([self.cached[r] + self.new[r] for r in order], dtype=torch.int32)
        starts = torch.cat([torch.zeros(1, dtype=torch.int32), new.cumsum(0, dtype=torch.int32)])
        decodes = 0
        if self.own:
            while decodes < len(order) and new[decodes] <= 3:
                decodes += 1
        on_cpu = lengths if cpu_lengths is None else torch.tensor(cpu_lengths, dtype=torch.int32)
        tokens = int(starts[-1])
        return self.metadata_type(
            seq_lens=lengths.cuda(),
            slot_mapping=torch.zeros(tokens, dtype=torch.int64, device="cuda"),
            block_table=self.table[list(order)],
            query_start_loc=starts.cuda(),
            num_actual_tokens=tokens,
            max_query_len=int(new.max()),
            max_seq_len=int(on_cpu.max()),
            is_prefill=decodes < len(order),
            num_decodes=decodes,
            num_decode_tokens=int(starts[decodes]),
            query_start_loc_cpu=starts,
            seq_lens_cpu=on_cpu,
        )

    def slots(self, request):
        """Return cached keys and values; new tokens of a chunk are not quantized."""
        before, fresh = self.cached[request], self.new[request]
        rows = self.store[self.table[request].long()].flatten(0, 1)[: before + fresh]
        key, value = dequantize_slots(rows, self.impl.tq_config)
        if not before or fresh > 128:
            key = torch.cat([key[:before], self.keys[request][before:].float()])
            value = torch.cat([value[:before], self.values[request][before:].float()])
        return key, value

    def reference(self, request):
        return self.attend(request, *self.slots(request))

    def exact(self, request):
        return self.attend(request, self.keys[request].float(), self.values[request].float())

    def attend(self, request, key, value):
        group = HEADS // KV_HEADS
        key, value = (t.repeat_interleave(group, 1).transpose(0, 1) for t in (key, value))
        query = self.queries[request].float().transpose(0, 1)
        mask = torch.ones(self.new[request], key.shape[1], dtype=torch.bool, device="cuda")
        mask = mask.tril(diagonal=self.cached[request])
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=SIZE**-0.5
        )
        return out.transpose(0, 1)


def error(value, reference):
    return round(float((value.float() - reference).norm() / reference.norm()), 5)


def report(out, check, own, stock, **numbers):
    """Record a row; the plugin must be correct, the stock backend wrong.

    ``own`` and ``stock`` are errors of the two backends; stock errors are of requests that must be
    wrong.
    """
    claim = f"{check}: the plugin equals attention over the dequantised slots"
    claim += ", the stock backend does not" if stock else ""
    passed = max(own) < ROUNDING and all(value > DAMAGE for value in stock)
    limits = {"limit_own": ROUNDING, **({"limit_stock": DAMAGE} if stock else {})}
    result_files.record_row(out, "turboquant-layer", claim, passed, **numbers, **limits)
    assert max(own) < ROUNDING
    assert all(value > DAMAGE for value in stock)


def _shown(errors):
    return {"shown_stock": errors[False], "shown_own": errors[True]}


@pytest.fixture(autouse=True)
def _workspace():
    from vllm.v1.worker import workspace

    if not workspace.is_workspace_manager_initialized():
        workspace.init_workspace_manager(torch.device("cuda"))


@pytest.mark.parametrize("preset", PRESETS)
def test_cached_prefix_is_correct_next_to_a_longer_prompt(preset, monkeypatch, results):
    errors, format_error = {}, {}
    for own in (False, True):
        batch = Batch(own, preset, monkeypatch)
        order = (2, 1, 0)
        outputs = dict(zip(order, batch.run(order), strict=True))
        errors[own] = {r: error(outputs[r], batch.reference(r)) for r in order}
        format_error = {r: error(batch.reference(r), batch.exact(r)) for r in (1, 2)}
    own, stock = errors[True], errors[False]
    report(
        results,
        f"mixed batch, {preset}",
        list(own.values()),
        [stock[1], stock[2]],
        shown_stock=stock,
        shown_own=own,
        format=format_error,
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_turboquant_ignores_overlong_sequence_lengths_from_the_cpu(preset, monkeypatch, results):
    errors = {}
    for own in (False, True):
        batch = Batch(own, preset, monkeypatch)
        (output,) = batch.run((2,), cpu_lengths=[batch.cached[2] + batch.new[2] + 2])
        errors[own] = error(output, batch.reference(2))
    report(
        results,
        f"lengths too long on the CPU, {preset}",
        [errors[True]],
        [errors[False]],
        **_shown(errors),
    )


@pytest.mark.parametrize("preset", PRESETS)
def test_cuda_graph_of_turboquant_uses_the_sequence_lengths_at_replay(preset, monkeypatch, results):
    errors = {}
    for own in (False, True):
        batch = Batch(own, preset, monkeypatch)
        real = batch.metadata((2,))
        metadata = batch.metadata((2,), cpu_lengths=[batch.new[2]])
        metadata.seq_lens.fill_(1)
        batch.forward((2,), metadata)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = batch.forward((2,), metadata)
        metadata.seq_lens.copy_(real.seq_lens)
        graph.replay()
        torch.cuda.synchronize()
        errors[own] = error(output, batch.reference(2))
    report(
        results,
        f"captured verify step, {preset}",
        [errors[True]],
        [errors[False]],
        **_shown(errors),
    )


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("context", [16384, 131072])
def test_turboquant_attends_to_all_tokens_of_long_contexts(preset, context, monkeypatch, results):
    batch = Batch(True, preset, monkeypatch, cached=(context, context - 5), new=(300, 3))
    verify, chunk = batch.run((1, 0))
    errors = {
        "chunk": error(chunk, batch.reference(0)),
        "verify": error(verify, batch.reference(1)),
    }
    format_error = error(batch.reference(1), batch.exact(1))
    report(
        results,
        f"long context, {context:,} tokens, {preset}",
        list(errors.values()),
        [],
        shown_own=errors,
        format=format_error,
    )
