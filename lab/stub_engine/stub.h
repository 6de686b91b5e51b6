/* The stub engine: vLLM's outside (arguments, HTTP paths, metrics, log lines) without a model. */
#ifndef STUB_H
#define STUB_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

/* json.c: a small tree; nodes live until json_free of the root. */
typedef enum { JSON_NULL, JSON_FALSE, JSON_TRUE, JSON_NUMBER, JSON_STRING, JSON_ARRAY, JSON_OBJECT } json_kind;
typedef struct json {
    json_kind kind;
    char *key;          /* name inside an object, else NULL */
    char *text;         /* string value */
    double number;
    struct json *child; /* first element or member */
    struct json *next;  /* next sibling */
} json;
json *json_parse(const char *text);
void json_free(json *node);
const json *json_get(const json *object, const char *key);
const char *json_text(const json *object, const char *key);
double json_number(const json *object, const char *key, double otherwise);
bool json_true(const json *object, const char *key);

/* buffer.c: growing text. */
typedef struct { char *data; size_t length, room; } buffer;
void put(buffer *b, const char *format, ...) __attribute__((format(printf, 2, 3)));
void put_json_string(buffer *b, const char *text);
void put_bytes(buffer *b, const char *bytes, size_t length);

/* settings.c: what argv and the environment say. */
typedef struct {
    const char *uds, *host, *master_addr;
    int nnodes, node_rank, master_port;
    int port, max_model_len, max_num_seqs, speculative_tokens;
    const char *names[16];
    int name_count;
    const char *kv_cache_dtype, *block_size, *kv_cache_memory_bytes;
    double load_s, token_s;
    bool tools, reasoning, prefix_caching;
    json *answers;
} settings;
extern settings config;
void read_settings(int argc, char **argv);
/* Whether a misbehaviour is on: named by STUB_FAULT, or by the file "stub-fault" beside the socket. */
bool fault(const char *name);
void say(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* answer.c: text for a prompt. The result belongs to the caller. */
char *answer_to(const json *request, const char *prompt, int turns);

/* metrics.c */
typedef struct {
    atomic_long running, prompt_tokens, generation_tokens, requests, prefix_hits;
    atomic_long drafts, draft_tokens, accepted_tokens;
} counters;
extern counters counted;
void count_prompt(int tokens, int earlier); /* earlier: of them in earlier messages */
void count_token(int index); /* the index-th token of an answer */
void put_metrics(buffer *b);

/* messages.c: Anthropic's form of an answer. */
typedef struct {
    const char *model, *text;
    int input_tokens, output_tokens;
    bool cut;
} message;
bool reply_message(int connection, const message *m);
bool stream_message(int connection, const message *m);

/* pooled.c: embeddings and rankings. */
int put_pooled(buffer *b, const json *request, const char *path);

/* api.c: one request, one answer; false closes the connection. */
bool serve_request(int connection, const char *method, const char *path, const char *body);

/* ranks.c: returns on the head once every rank has joined, and never on a rank. */
void meet_ranks(void);

/* http.c */
bool send_all(int connection, const char *data, size_t length);
bool send_reply(int connection, int status, const char *type, const buffer *body);
void serve_forever(int listener);

#endif
