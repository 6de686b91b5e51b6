/* Answers in the form of Anthropic's API, as vLLM gives them under /v1/messages. */
#include "stub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool send_named(int connection, const char *name, const buffer *data) {
    buffer event = {0}, chunk = {0};
    put(&event, "event: %s\ndata: %s\n\n", name, data->data);
    put(&chunk, "%zx\r\n%s\r\n", event.length, event.data);
    bool sent = send_all(connection, chunk.data, chunk.length);
    free(event.data);
    free(chunk.data);
    return sent;
}

static bool send_text(int connection, const char *name, const char *text) {
    buffer b = {0};
    put(&b, "%s", text);
    bool sent = send_named(connection, name, &b);
    free(b.data);
    return sent;
}

static void put_message(buffer *b, const message *m, bool whole) {
    put(b, "{\"id\":\"msg_stub\",\"type\":\"message\",\"role\":\"assistant\",\"model\":");
    put_json_string(b, m->model);
    put(b, ",\"content\":[");
    if (whole) {
        put(b, "{\"type\":\"text\",\"text\":");
        put_json_string(b, m->text);
        put(b, "}");
    }
    put(b, "],\"stop_reason\":");
    if (whole) put(b, "\"%s\"", m->cut ? "max_tokens" : "end_turn");
    else put(b, "null");
    put(b, ",\"stop_sequence\":null,\"usage\":{\"input_tokens\":%d,\"output_tokens\":%d}}",
        m->input_tokens, whole ? m->output_tokens : 0);
}

bool reply_message(int connection, const message *m) {
    buffer b = {0};
    put_message(&b, m, true);
    bool sent = send_reply(connection, 200, "application/json", &b);
    free(b.data);
    return sent;
}

bool stream_message(int connection, const message *m) {
    static const char head[] = "HTTP/1.1 200 OK\r\nServer: stub\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n";
    buffer start = {0}, piece = {0}, end = {0};
    put(&start, "{\"type\":\"message_start\",\"message\":");
    put_message(&start, m, false);
    put(&start, "}");
    put(&piece, "{\"type\":\"content_block_delta\",\"index\":0,\"delta\":{\"type\":\"text_delta\",\"text\":");
    put_json_string(&piece, m->text);
    put(&piece, "}}");
    put(&end, "{\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"%s\",\"stop_sequence\":null},\"usage\":{\"input_tokens\":%d,\"output_tokens\":%d}}",
        m->cut ? "max_tokens" : "end_turn", m->input_tokens, m->output_tokens);
    bool sent = send_all(connection, head, sizeof head - 1) && send_named(connection, "message_start", &start)
        && send_text(connection, "content_block_start", "{\"type\":\"content_block_start\",\"index\":0,\"content_block\":{\"type\":\"text\",\"text\":\"\"}}")
        && send_named(connection, "content_block_delta", &piece)
        && send_text(connection, "content_block_stop", "{\"type\":\"content_block_stop\",\"index\":0}")
        && send_named(connection, "message_delta", &end)
        && send_text(connection, "message_stop", "{\"type\":\"message_stop\"}")
        && send_all(connection, "0\r\n\r\n", 5);
    free(start.data);
    free(piece.data);
    free(end.data);
    return sent;
}
