/* Start, load, listen, and the faults of a whole process: crashes and leaks. */
#include "stub.h"

#include <arpa/inet.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

static void leave(int signal_number) {
    (void)signal_number;
    _exit(0);
}

static int bound_socket(void) {
    int listener, one = 1;
    if (config.uds) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        snprintf(address.sun_path, sizeof address.sun_path, "%s", config.uds);
        unlink(config.uds);
        listener = socket(AF_UNIX, SOCK_STREAM, 0);
        if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address)) return -1;
        return listener;
    }
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((unsigned short)config.port)};
    inet_pton(AF_INET, config.host, &address.sin_addr);
    listener = socket(AF_INET, SOCK_STREAM, 0);
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (listener < 0 || bind(listener, (struct sockaddr *)&address, sizeof address)) return -1;
    return listener;
}

static void fail_at_start(void) {
    static const struct { const char *name, *line; } ends[] = {
        {"crash-at-start", "RuntimeError: Engine core initialization failed. See root cause above."},
        {"oom-at-start", "ValueError: Free memory on device cuda:0 (10.53/121.69 GiB) on startup is less than desired GPU memory utilization (0.91, 110.74 GiB)."},
        {"plugin-missing", "ValueError: Unknown quantization method: spark_inc. Must be one of ['awq', 'fp8', 'gptq', 'inc']."}};
    for (size_t i = 0; i < sizeof ends / sizeof *ends; i++)
        if (fault(ends[i].name)) {
            printf("(EngineCore pid=%d) ERROR 11-26 12:00:00 [core.py:718] %s\n", (int)getpid(), ends[i].line);
            exit(1);
        }
}

static bool keep(size_t bytes) {
    static char *volatile kept; /* or the compiler sees that nobody reads it, and keeps nothing */
    kept = malloc(bytes);
    if (kept) memset(kept, 1, bytes);
    return kept;
}

static void *misbehave(void *unused) {
    const char *text = getenv("STUB_FAULT_AFTER_S");
    double after_s = text ? atof(text) : 2, passed_s = 0;
    for (;; passed_s += 0.1) {
        usleep(100000);
        if (fault("crash-later") && passed_s >= after_s) {
            printf("(EngineCore pid=%d) ERROR CUDA error: an illegal memory access was encountered\n", (int)getpid());
            fflush(stdout);
            _exit(1);
        }
        if (fault("leak") && passed_s >= after_s) keep(16 << 20);
    }
    return unused;
}

/* Weights that are larger than anybody planned: 4 GiB at some 1.5 GiB/s, the rest of a load after it. */
static void load(void) {
    for (int step = 0; step < 256 && fault("greedy-load") && keep(16 << 20); step++) usleep(10000);
    usleep((useconds_t)(config.load_s * 0.8e6));
    say("GPU KV cache size: %d tokens", config.max_model_len * config.max_num_seqs);
    say("Maximum concurrency for %d tokens per request: %d.00x", config.max_model_len, config.max_num_seqs);
    usleep((useconds_t)(config.load_s * 0.2e6));
    while (fault("never-ready")) usleep(200000);
}

static void log_start(int argc, char **argv) {
    buffer words = {0};
    for (int i = 1; i < argc; i++) put(&words, "%s ", argv[i]);
    say("vLLM API server version 0.0.0+stub");
    say("args: %s", words.data ? words.data : "");
    if (words.data && (strstr(words.data, "\"moe_backend\":\"triton\"") ||
                       strstr(words.data, "--moe-backend triton")))
        say("Using TRITON Unquantized MoE backend out of potential backends: ['TRITON'].");
    free(words.data);
    say("Using V2 Model Runner");
    const char *extra = getenv("STUB_LOG");
    for (char *copy = extra ? strdup(extra) : NULL, *line = copy; line;) {
        char *end = strchr(line, '|');
        if (end) *end = 0;
        if (!fault("log-missing")) say("%s", line);
        line = end ? end + 1 : NULL;
        if (!line) free(copy);
    }
    say("Loading model from scratch...");
    if (fault("log-forbidden")) say("WARNING setting cudagraph_mode=PIECEWISE");
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    /* As process 1 of a container only signals with a handler end it. */
    signal(SIGTERM, leave);
    signal(SIGINT, leave);
    read_settings(argc, argv);
    int listener = bound_socket(); /* like vLLM: bound early, listening only when loaded */
    if (listener < 0) {
        perror("bind");
        return 1;
    }
    log_start(argc, argv);
    fail_at_start();
    meet_ranks();
    load();
    if (listen(listener, 128)) {
        perror("listen");
        return 1;
    }
    say("Application startup complete.");
    pthread_t thread;
    pthread_create(&thread, NULL, misbehave, NULL);
    serve_forever(listener);
}
