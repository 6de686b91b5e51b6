/* The paths of vLLM's server that clients, the check and the watch use. */
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define PIECE 4 /* characters a token stands for */

static bool reply_json(int connection, int status, buffer *b) {
    bool sent = send_reply(connection, status, "application/json", b);
    free(b->data);
    return sent;
}

static bool reply_error(int connection, int status, const char *text) {
    buffer b = {0};
    put(&b, "{\"error\":{\"message\":");
    put_json_string(&b, text);
    put(&b, ",\"type\":\"stub\",\"code\":%d}}", status);
    return reply_json(connection, status, &b);
}

static int tokens_of(const char *text) {
    return (int)((strlen(text) + PIECE - 1) / PIECE);
}

/* The text of the last message of the user, and how many tokens the messages before it have;
   content may be a string or a list of text parts. */
static char *prompt_of(const json *request, int *turns, int *earlier) {
    buffer b = {0};
    put(&b, "%s", "");
    const char *plain = json_text(request, "prompt");
    if (!plain) plain = json_text(request, "input");
    if (plain) put(&b, "%s", plain);
    const json *messages = json_get(request, "messages"), *last = NULL;
    int tokens = *turns = *earlier = 0;
    for (const json *item = messages ? messages->child : NULL; item; item = item->next) {
        const char *role = json_text(item, "role"), *text = json_text(item, "content");
        if (role && !strcmp(role, "user")) last = item, (*turns)++, *earlier = tokens;
        tokens += text ? tokens_of(text) : 0;
    }
    const json *content = json_get(last, "content");
    if (content && content->kind == JSON_STRING) put(&b, "%s", content->text);
    for (const json *part = content ? content->child : NULL; part; part = part->next) {
        const char *sound = json_text(json_get(part, "input_audio"), "data");
        if (sound && !fault("blind")) *earlier += (int)(strlen(sound) / 1000);
    }
    for (const json *part = content ? content->child : NULL; part; part = part->next)
        if (json_text(part, "text")) put(&b, "%s", json_text(part, "text"));
    return b.data;
}

/* The last pixel of a stored (not compressed) RGB picture in a data URL; "" without a picture. */
static const char *colour_of(const json *request) {
    const char *url = NULL;
    const json *messages = json_get(request, "messages");
    for (const json *item = messages ? messages->child : NULL; item; item = item->next) {
        const json *content = json_get(item, "content");
        for (const json *part = content ? content->child : NULL; part; part = part->next)
            if (json_text(json_get(part, "image_url"), "url")) url = json_text(json_get(part, "image_url"), "url");
    }
    const char *data = url ? strstr(url, ";base64,") : NULL;
    if (!data) return "";
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    unsigned char bytes[48];
    size_t length = 0;
    unsigned bits = 0, count = 0;
    /* Only the end of the file matters: the pixel, then 4 bytes of checksum, 4 of CRC, 12 of IEND. */
    for (const char *at = data + 8; *at && *at != '='; at++) {
        const char *digit = strchr(digits, *at);
        if (!digit) return "";
        bits = bits << 6 | (unsigned)(digit - digits);
        if ((count += 6) < 8) continue;
        count -= 8;
        bytes[length++ % sizeof bytes] = (unsigned char)(bits >> count);
    }
    if (length < 23) return "";
    unsigned char red = bytes[(length - 23) % sizeof bytes], blue = bytes[(length - 21) % sizeof bytes];
    return fault("blind") || red > blue ? "Red" : "Blue";
}

static bool known_name(const char *name) {
    for (int i = 0; i < config.name_count; i++)
        if (name && !strcmp(name, config.names[i])) return true;
    return !name;
}

static void put_models(buffer *b) {
    int length = fault("wrong-context") ? config.max_model_len / 2 : config.max_model_len;
    put(b, "{\"object\":\"list\",\"data\":[");
    for (int i = 0; i < config.name_count; i++) {
        put(b, "%s{\"id\":", i ? "," : "");
        put_json_string(b, fault("wrong-name") ? "other" : config.names[i]);
        put(b, ",\"object\":\"model\",\"created\":%ld,\"owned_by\":\"vllm\",\"max_model_len\":%d}", (long)time(NULL), length);
    }
    put(b, "]}");
}

typedef struct {
    const char *name, *id, *text, *reasoning;
    bool chat, tool;
    int prompt_tokens, completion_tokens;
    const char *finish;
} answer;

static void put_usage(buffer *b, const answer *a) {
    put(b, "\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d,\"completion_tokens\":%d}",
        a->prompt_tokens, a->prompt_tokens + a->completion_tokens, a->completion_tokens);
}

static void put_tool_call(buffer *b) {
    const char *arguments = fault("tool-types") ? "{\"city\": \"Paris\", \"days\": \"3\"}" : "{\"city\": \"Paris\", \"days\": 3}";
    put(b, "[{\"index\":0,\"id\":\"call_1\",\"type\":\"function\",\"function\":{\"name\":\"get_weather\",\"arguments\":");
    put_json_string(b, arguments);
    put(b, "}}]");
}

static bool reply_whole(int connection, const answer *a) {
    buffer b = {0};
    put(&b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%ld,\"model\":", a->id,
        a->chat ? "chat.completion" : "text_completion", (long)time(NULL));
    put_json_string(&b, a->name);
    put(&b, ",\"choices\":[{\"index\":0,");
    if (a->chat) {
        put(&b, "\"message\":{\"role\":\"assistant\",\"content\":");
        if (a->tool) put(&b, "null,\"tool_calls\":"), put_tool_call(&b);
        else put_json_string(&b, a->text);
        put(&b, ",\"reasoning\":");
        if (a->reasoning) put_json_string(&b, a->reasoning);
        else put(&b, "null");
        put(&b, "}");
    } else {
        put(&b, "\"text\":");
        put_json_string(&b, a->text);
    }
    put(&b, ",\"finish_reason\":\"%s\"}],", a->finish);
    put_usage(&b, a);
    put(&b, "}");
    return reply_json(connection, 200, &b);
}

static bool send_event(int connection, const char *text) {
    buffer b = {0};
    put(&b, "%zx\r\ndata: %s\n\n\r\n", strlen(text) + 8, text);
    bool sent = send_all(connection, b.data, b.length);
    free(b.data);
    return sent;
}

static bool send_piece(int connection, const answer *a, const char *piece, const char *finish, bool usage) {
    buffer b = {0};
    put(&b, "{\"id\":\"%s\",\"object\":\"%s\",\"created\":%ld,\"model\":", a->id,
        a->chat ? "chat.completion.chunk" : "text_completion", (long)time(NULL));
    put_json_string(&b, a->name);
    put(&b, ",\"choices\":[");
    if (!usage) {
        put(&b, a->chat ? "{\"index\":0,\"delta\":{\"content\":" : "{\"index\":0,\"text\":");
        put_json_string(&b, piece);
        put(&b, a->chat ? "},\"finish_reason\":" : ",\"finish_reason\":");
        if (finish) put_json_string(&b, finish);
        else put(&b, "null");
        put(&b, "}],\"usage\":null}");
    } else {
        put(&b, "],");
        put_usage(&b, a);
        put(&b, "}");
    }
    bool sent = send_event(connection, b.data);
    free(b.data);
    return sent;
}

static void work(void) {
    usleep((useconds_t)((config.token_s + (fault("slow") ? 0.01 : 0)) * 1e6));
}

static bool reply_stream(int connection, const answer *a, bool usage) {
    static const char head[] = "HTTP/1.1 200 OK\r\nServer: stub\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    if (!send_all(connection, head, sizeof head - 1)) return false;
    size_t length = strlen(a->text);
    for (size_t at = 0; at < length; at += PIECE) {
        char piece[PIECE + 1] = "";
        memcpy(piece, a->text + at, length - at < PIECE ? length - at : PIECE);
        if (!send_piece(connection, a, piece, NULL, false)) return false;
        if (fault("stream-cut")) return false;
        count_token((int)(at / PIECE));
        work();
    }
    count_token((int)(length / PIECE));
    if (!send_piece(connection, a, "", a->finish, false)) return false;
    if (usage && !send_piece(connection, a, "", NULL, true)) return false;
    return send_event(connection, "[DONE]") && send_all(connection, "0\r\n\r\n", 5);
}

/* ignore_eos: like vLLM, go on to the limit whatever there is to say. */
static char *filled(char *text, int max_tokens) {
    buffer b = {0};
    put(&b, "%s", text);
    while (tokens_of(b.data) < max_tokens) put(&b, " %s", *text ? text : "and");
    free(text);
    return b.data;
}

static bool cut_to(char *text, int max_tokens) {
    if (max_tokens <= 0 || tokens_of(text) <= max_tokens) return false;
    text[(size_t)max_tokens * PIECE] = 0;
    return true;
}

typedef enum { TEXT, CHAT, MESSAGES } form;

static bool complete(int connection, const json *request, form asked) {
    bool chat = asked != TEXT;
    static atomic_long ids;
    int turns, earlier;
    char id[32];
    char *prompt = prompt_of(request, &turns, &earlier), *text = answer_to(request, prompt, turns);
    if (*colour_of(request)) {
        free(text);
        text = strdup(colour_of(request));
        if (!text) abort();
    }
    const json *template = json_get(request, "chat_template_kwargs");
    const json *thinking = json_get(template, "enable_thinking");
    snprintf(id, sizeof id, "%s-%ld", chat ? "chatcmpl" : "cmpl", atomic_fetch_add(&ids, 1));
    answer a = {.name = json_text(request, "model"), .id = id, .text = text, .chat = chat, .finish = "stop"};
    if (!a.name) a.name = config.names[0];
    int limit = (int)json_number(request, "max_tokens", json_number(request, "max_completion_tokens", 0));
    if (json_true(request, "ignore_eos") && limit > 0) a.text = text = filled(text, limit);
    if (cut_to(text, limit)) a.finish = "length";
    buffer mixed = {0};
    if (chat && config.reasoning && (!thinking || thinking->kind != JSON_FALSE)) {
        if (fault("reasoning-mixed")) {
            put(&mixed, "<think>Let me think.</think>%s", text);
            a.text = mixed.data;
        } else a.reasoning = "Let me think about it.";
    }
    const json *tools = json_get(request, "tools");
    if (chat && config.tools && tools && tools->child && !fault("no-tool")) {
        a.tool = true;
        a.finish = "tool_calls";
    }
    a.prompt_tokens = earlier + tokens_of(prompt) + 4;
    a.completion_tokens = tokens_of(a.text) + 1;
    count_prompt(a.prompt_tokens, earlier);
    bool sent;
    message m = {a.name, a.text, a.prompt_tokens, a.completion_tokens, !strcmp(a.finish, "length")};
    if (asked == MESSAGES && json_true(request, "stream")) sent = stream_message(connection, &m);
    else if (json_true(request, "stream"))
        sent = reply_stream(connection, &a, json_true(json_get(request, "stream_options"), "include_usage"));
    else {
        for (int i = 0; i < a.completion_tokens; i++) {
            count_token(i);
            work();
        }
        sent = asked == MESSAGES ? reply_message(connection, &m) : reply_whole(connection, &a);
    }
    free(mixed.data);
    free(text);
    free(prompt);
    return sent;
}

static bool generate(int connection, const char *path, const char *body) {
    if (fault("error-500")) return reply_error(connection, 500, "EngineCore encountered an issue");
    json *request = json_parse(body);
    if (!request) return reply_error(connection, 400, "the request is not JSON");
    bool more;
    if (!known_name(json_text(request, "model"))) more = reply_error(connection, 404, "The model does not exist.");
    else {
        atomic_fetch_add(&counted.running, 1);
        while (fault("wedge")) usleep(100000);
        bool text = strstr(path, "completions") && !strstr(path, "chat");
        more = complete(connection, request, strstr(path, "messages") ? MESSAGES : text ? TEXT : CHAT);
        atomic_fetch_sub(&counted.running, 1);
    }
    json_free(request);
    return more;
}

static bool pool(int connection, const char *path, const char *body) {
    json *request = json_parse(body);
    if (!request) return reply_error(connection, 400, "the request is not JSON");
    buffer b = {0};
    count_prompt(put_pooled(&b, request, path), 0);
    json_free(request);
    return reply_json(connection, 200, &b);
}

static bool reply_text(int connection, int status, const char *type, const char *text) {
    buffer b = {0};
    put(&b, "%s", text);
    bool sent = send_reply(connection, status, type, &b);
    free(b.data);
    return sent;
}

bool serve_request(int connection, const char *method, const char *path, const char *body) {
    buffer b = {0};
    bool post = !strcmp(method, "POST");
    if (strcmp(path, "/health") && strcmp(path, "/metrics")) say("\"%s %s HTTP/1.1\"", method, path);
    if (!strcmp(path, "/health")) {
        bool ill = fault("unhealthy") || (fault("unhealthy-later") && atomic_load(&counted.requests) > 0);
        return reply_text(connection, ill ? 503 : 200, "text/plain", "");
    }
    if (!strcmp(path, "/metrics")) {
        put_metrics(&b);
        bool sent = send_reply(connection, 200, "text/plain; version=0.0.4", &b);
        free(b.data);
        return sent;
    }
    if (!strcmp(path, "/version")) return reply_text(connection, 200, "application/json", "{\"version\":\"0.0.0+stub\"}");
    if (!strcmp(path, "/v1/models")) {
        put_models(&b);
        return reply_json(connection, 200, &b);
    }
    static const char *const generating[] = {
        "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses", "/invocations"};
    for (size_t i = 0; post && i < sizeof generating / sizeof *generating; i++)
        if (!strcmp(path, generating[i])) return generate(connection, path, body);
    static const char *const pooling[] = {"/v1/embeddings", "/v1/rerank", "/classify"};
    for (size_t i = 0; post && i < sizeof pooling / sizeof *pooling; i++)
        if (!strcmp(path, pooling[i])) return pool(connection, path, body);
    /* Open doors of the real engine: answered here, so that a test sees whether they are shut. */
    static const char *const open[] = {"/tokenize", "/detokenize", "/load", "/docs", "/openapi.json", "/ping"};
    for (size_t i = 0; i < sizeof open / sizeof *open; i++)
        if (!strcmp(path, open[i])) return reply_text(connection, 200, "application/json", "{\"stub\":true}");
    return reply_error(connection, 404, "Not Found");
}
