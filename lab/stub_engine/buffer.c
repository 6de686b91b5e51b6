/* Growing text. */
#include "stub.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void make_room(buffer *b, size_t more) {
    if (b->length + more + 1 <= b->room) return;
    b->room = (b->length + more + 1) * 2;
    b->data = realloc(b->data, b->room);
    if (!b->data) abort();
}

void put_bytes(buffer *b, const char *bytes, size_t length) {
    make_room(b, length);
    memcpy(b->data + b->length, bytes, length);
    b->length += length;
    b->data[b->length] = 0;
}

void put(buffer *b, const char *format, ...) {
    va_list words, again;
    va_start(words, format);
    va_copy(again, words);
    int length = vsnprintf(NULL, 0, format, words);
    va_end(words);
    make_room(b, (size_t)length);
    vsnprintf(b->data + b->length, (size_t)length + 1, format, again);
    va_end(again);
    b->length += (size_t)length;
}

void put_json_string(buffer *b, const char *text) {
    put_bytes(b, "\"", 1);
    for (const unsigned char *c = (const unsigned char *)text; *c; c++) {
        if (*c == '"' || *c == '\\') put(b, "\\%c", *c);
        else if (*c == '\n') put(b, "\\n");
        else if (*c < 0x20) put(b, "\\u%04x", *c);
        else put_bytes(b, (const char *)c, 1);
    }
    put_bytes(b, "\"", 1);
}
