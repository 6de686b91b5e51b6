/* What argv and the environment say. Options of vLLM that mean nothing here are accepted. */
#include "stub.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

settings config = {
    .host = "127.0.0.1", .port = 8000, .master_addr = "127.0.0.1", .nnodes = 1, .max_model_len = 4096, .max_num_seqs = 4,
    .kv_cache_dtype = "auto", .block_size = "16", .kv_cache_memory_bytes = "None",
    .load_s = 0.2,
};

void say(const char *format, ...) {
    char when[32], line[4096];
    time_t now = time(NULL);
    strftime(when, sizeof when, "%m-%d %H:%M:%S", localtime(&now));
    va_list words;
    va_start(words, format);
    vsnprintf(line, sizeof line, format, words);
    va_end(words);
    printf("(APIServer pid=%d) INFO %s [stub.c:1] %s\n", (int)getpid(), when, line);
    fflush(stdout);
}

static bool listed(const char *list, const char *name) {
    size_t length = strlen(name);
    for (const char *at = list; at && *at; at = strchr(at, ','), at = at ? at + 1 : NULL)
        if (!strncmp(at, name, length) && strchr(",\n", at[length])) return true;
    return false;
}

bool fault(const char *name) {
    if (listed(getenv("STUB_FAULT"), name)) return true;
    if (!config.uds) return false;
    char path[512], text[256] = "";
    const char *slash = strrchr(config.uds, '/');
    snprintf(path, sizeof path, "%.*s/stub-fault", (int)(slash ? slash - config.uds : 0), config.uds);
    FILE *file = fopen(path, "r");
    if (!file) return false;
    text[fread(text, 1, sizeof text - 1, file)] = 0;
    fclose(file);
    return listed(text, name);
}

static double seconds(const char *name, double otherwise) {
    const char *text = getenv(name);
    return text ? atof(text) : otherwise;
}

static void take(const char *name, const char *text) {
    if (!strcmp(name, "--uds")) config.uds = text;
    else if (!strcmp(name, "--host")) config.host = text;
    else if (!strcmp(name, "--port")) config.port = atoi(text);
    else if (!strcmp(name, "--nnodes")) config.nnodes = atoi(text);
    else if (!strcmp(name, "--node-rank")) config.node_rank = atoi(text);
    else if (!strcmp(name, "--master-addr")) config.master_addr = text;
    else if (!strcmp(name, "--master-port")) config.master_port = atoi(text);
    else if (!strcmp(name, "--max-model-len")) config.max_model_len = atoi(text);
    else if (!strcmp(name, "--max-num-seqs")) config.max_num_seqs = atoi(text);
    else if (!strcmp(name, "--kv-cache-dtype")) config.kv_cache_dtype = text;
    else if (!strcmp(name, "--block-size")) config.block_size = text;
    else if (!strcmp(name, "--kv-cache-memory-bytes")) config.kv_cache_memory_bytes = text;
    else if (!strcmp(name, "--served-model-name")) {
        if (config.name_count < 16) config.names[config.name_count++] = text;
    } else if (!strcmp(name, "--speculative-config")) {
        json *parsed = json_parse(text);
        config.speculative_tokens = (int)json_number(parsed, "num_speculative_tokens", 1);
        json_free(parsed);
    }
}

static void take_flag(const char *name) {
    if (!strcmp(name, "--enable-auto-tool-choice")) config.tools = true;
    if (!strcmp(name, "--reasoning-parser")) config.reasoning = true;
    if (!strcmp(name, "--enable-prefix-caching")) config.prefix_caching = true;
    if (!strncmp(name, "--no-such", 9)) {
        fprintf(stderr, "vllm serve: error: unrecognized arguments: %s\n", name);
        exit(2);
    }
}

void read_settings(int argc, char **argv) {
    char *name = NULL, *model = NULL;
    for (int i = 1; i < argc; i++) {
        if (!strncmp(argv[i], "--", 2)) {
            char *equals = strchr(argv[i], '=');
            name = argv[i];
            if (equals) {
                *equals = 0;
                take(name, equals + 1);
            }
            take_flag(name);
            if (equals) name = NULL;
        } else if (name) {
            take(name, argv[i]);
            /* --served-model-name takes every word up to the next option. */
            if (strcmp(name, "--served-model-name")) name = NULL;
        } else if (strcmp(argv[i], "serve")) model = argv[i];
    }
    if (!config.name_count) config.names[config.name_count++] = model ? model : "stub";
    config.load_s = seconds("STUB_LOAD_S", config.load_s);
    config.token_s = seconds("STUB_PIECE_S", 0);
    if (getenv("STUB_ANSWERS")) config.answers = json_parse(getenv("STUB_ANSWERS"));
}
