/* The counters a check and a watch read, under vLLM's names. */
#include "stub.h"

counters counted;

void count_prompt(int tokens, int earlier) {
    if (fault("counters-flat")) return;
    if (config.prefix_caching && !fault("no-prefix-hits")) atomic_fetch_add(&counted.prefix_hits, earlier);
    atomic_fetch_add(&counted.prompt_tokens, tokens);
    atomic_fetch_add(&counted.requests, 1);
}

void count_token(int index) {
    if (fault("counters-flat")) return;
    atomic_fetch_add(&counted.generation_tokens, 1);
    int width = config.speculative_tokens;
    /* A step yields one token of the model and the accepted drafts: 4 of 5 drafts are accepted. */
    if (!width || index % (width + 1) || fault("no-drafts")) return;
    atomic_fetch_add(&counted.drafts, 1);
    long before = atomic_fetch_add(&counted.draft_tokens, width);
    int fifths = fault("low-acceptance") ? 0 : fault("some-drafts") ? 1 : 4;
    atomic_fetch_add(&counted.accepted_tokens, (before + width) * fifths / 5 - before * fifths / 5);
}

static void metric(buffer *b, const char *kind, const char *name, long number) {
    put(b, "# HELP vllm:%s %s\n# TYPE vllm:%s %s\n", name, name, name, kind);
    put(b, "vllm:%s{engine=\"0\",model_name=\"%s\"} %ld.0\n", name, config.names[0], number);
}

void put_metrics(buffer *b) {
    metric(b, "gauge", "num_requests_running", atomic_load(&counted.running));
    metric(b, "gauge", "num_requests_waiting", 0);
    metric(b, "counter", "prompt_tokens_total", atomic_load(&counted.prompt_tokens));
    metric(b, "counter", "generation_tokens_total", atomic_load(&counted.generation_tokens));
    metric(b, "counter", "request_success_total", atomic_load(&counted.requests));
    metric(b, "gauge", "kv_cache_usage_perc", 0);
    if (config.prefix_caching) metric(b, "counter", "prefix_cache_hits_total", atomic_load(&counted.prefix_hits));
    if (config.speculative_tokens && !fault("no-drafts")) {
        metric(b, "counter", "spec_decode_num_drafts_total", atomic_load(&counted.drafts));
        metric(b, "counter", "spec_decode_num_draft_tokens_total", atomic_load(&counted.draft_tokens));
        metric(b, "counter", "spec_decode_num_accepted_tokens_total", atomic_load(&counted.accepted_tokens));
    }
    if (!fault("no-cache-info"))
        put(b, "vllm:cache_config_info{block_size=\"%s\",cache_dtype=\"%s\",engine=\"0\",kv_cache_memory_bytes=\"%s\"} 1.0\n",
            config.block_size, config.kv_cache_dtype, config.kv_cache_memory_bytes);
}
