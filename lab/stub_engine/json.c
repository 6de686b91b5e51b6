/* A JSON reader: enough for requests of chat clients, strict enough to refuse what is not JSON. */
#include "stub.h"

#include <stdlib.h>
#include <string.h>

static json *value(const char **at, int depth);

static void skip(const char **at) {
    while (**at && strchr(" \t\r\n", **at)) (*at)++;
}

static json *node(json_kind kind) {
    json *made = calloc(1, sizeof *made);
    if (!made) abort();
    made->kind = kind;
    return made;
}

static void put_utf8(buffer *b, unsigned code) {
    char out[4];
    size_t length;
    if (code < 0x80) { out[0] = (char)code; length = 1; }
    else if (code < 0x800) {
        out[0] = (char)(0xc0 | code >> 6); out[1] = (char)(0x80 | (code & 0x3f)); length = 2;
    } else if (code < 0x10000) {
        out[0] = (char)(0xe0 | code >> 12); out[1] = (char)(0x80 | (code >> 6 & 0x3f));
        out[2] = (char)(0x80 | (code & 0x3f)); length = 3;
    } else {
        out[0] = (char)(0xf0 | code >> 18); out[1] = (char)(0x80 | (code >> 12 & 0x3f));
        out[2] = (char)(0x80 | (code >> 6 & 0x3f)); out[3] = (char)(0x80 | (code & 0x3f)); length = 4;
    }
    put_bytes(b, out, length);
}

static bool hex4(const char *text, unsigned *code) {
    char digits[5] = {0};
    memcpy(digits, text, strnlen(text, 4));
    char *end;
    *code = (unsigned)strtoul(digits, &end, 16);
    return end == digits + 4;
}

static char *string(const char **at) {
    buffer b = {0};
    put_bytes(&b, "", 0);
    for ((*at)++; **at != '"'; (*at)++) {
        if (!**at) { free(b.data); return NULL; }
        if (**at != '\\') { put_bytes(&b, *at, 1); continue; }
        (*at)++;
        static const char from[] = "nrtbf", to[] = "\n\r\t\b\f";
        const char *known = **at ? strchr(from, **at) : NULL;
        if (**at == 'u') {
            unsigned code, low;
            if (!hex4(*at + 1, &code)) { free(b.data); return NULL; }
            *at += 4;
            if (code >= 0xd800 && code < 0xdc00 && (*at)[1] == '\\' && (*at)[2] == 'u' && hex4(*at + 3, &low)) {
                code = 0x10000 + ((code - 0xd800) << 10) + (low - 0xdc00);
                *at += 6;
            }
            put_utf8(&b, code);
        } else if (known) put_bytes(&b, to + (known - from), 1);
        else if (**at) put_bytes(&b, *at, 1);
        else { free(b.data); return NULL; }
    }
    (*at)++;
    return b.data;
}

static json *members(const char **at, json_kind kind, char close, int depth) {
    json *whole = node(kind), **end = &whole->child;
    (*at)++;
    skip(at);
    if (**at == close) { (*at)++; return whole; }
    for (;;) {
        char *key = NULL;
        skip(at);
        if (kind == JSON_OBJECT) {
            if (**at != '"' || !(key = string(at))) break;
            skip(at);
            if (*(*at)++ != ':') { free(key); break; }
        }
        json *item = value(at, depth + 1);
        if (!item) { free(key); break; }
        item->key = key;
        *end = item;
        end = &item->next;
        skip(at);
        if (**at == close) { (*at)++; return whole; }
        if (*(*at)++ != ',') break;
    }
    json_free(whole);
    return NULL;
}

static json *value(const char **at, int depth) {
    static const struct { const char *word; json_kind kind; } words[] = {
        {"null", JSON_NULL}, {"false", JSON_FALSE}, {"true", JSON_TRUE}};
    if (depth > 64) return NULL;
    skip(at);
    if (**at == '{') return members(at, JSON_OBJECT, '}', depth);
    if (**at == '[') return members(at, JSON_ARRAY, ']', depth);
    if (**at == '"') {
        char *text = string(at);
        if (!text) return NULL;
        json *made = node(JSON_STRING);
        made->text = text;
        return made;
    }
    for (size_t i = 0; i < 3; i++) {
        size_t length = strlen(words[i].word);
        if (!strncmp(*at, words[i].word, length)) { *at += length; return node(words[i].kind); }
    }
    char *end;
    double number = strtod(*at, &end);
    if (end == *at) return NULL;
    *at = end;
    json *made = node(JSON_NUMBER);
    made->number = number;
    return made;
}

json *json_parse(const char *text) {
    const char *at = text;
    json *root = value(&at, 0);
    if (root) skip(&at);
    if (root && *at) { json_free(root); return NULL; }
    return root;
}

void json_free(json *one) {
    while (one) {
        json *next = one->next;
        json_free(one->child);
        free(one->key);
        free(one->text);
        free(one);
        one = next;
    }
}

const json *json_get(const json *object, const char *key) {
    if (!object || object->kind != JSON_OBJECT) return NULL;
    for (const json *item = object->child; item; item = item->next)
        if (!strcmp(item->key, key)) return item;
    return NULL;
}

const char *json_text(const json *object, const char *key) {
    const json *found = json_get(object, key);
    return found && found->kind == JSON_STRING ? found->text : NULL;
}

double json_number(const json *object, const char *key, double otherwise) {
    const json *found = json_get(object, key);
    return found && found->kind == JSON_NUMBER ? found->number : otherwise;
}

bool json_true(const json *object, const char *key) {
    const json *found = json_get(object, key);
    return found && found->kind == JSON_TRUE;
}
