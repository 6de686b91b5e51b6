/* HTTP/1.1 with a thread per connection: enough for nginx, http.client and curl. */
#include "stub.h"

#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MAX_HEAD 65536
#define MAX_BODY (64 << 20)

bool send_all(int connection, const char *data, size_t length) {
    while (length) {
        ssize_t sent = send(connection, data, length, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent <= 0) return false;
        data += sent;
        length -= (size_t)sent;
    }
    return true;
}

static const char *reason(int status) {
    switch (status) {
    case 200: return "OK";
    case 400: return "Bad Request";
    case 404: return "Not Found";
    case 503: return "Service Unavailable";
    default: return "Internal Server Error";
    }
}

bool send_reply(int connection, int status, const char *type, const buffer *body) {
    buffer b = {0};
    put(&b, "HTTP/1.1 %d %s\r\nServer: stub\r\nContent-Type: %s\r\nContent-Length: %zu\r\n\r\n", status,
        reason(status), type, body->length);
    put_bytes(&b, body->data ? body->data : "", body->length);
    bool sent = send_all(connection, b.data, b.length);
    free(b.data);
    return sent;
}

/* Receives until `length` bytes are there. */
static bool fill(int connection, buffer *b, size_t length) {
    char piece[16384];
    while (b->length < length) {
        ssize_t got = recv(connection, piece, sizeof piece, 0);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) return false;
        put_bytes(b, piece, (size_t)got);
    }
    return true;
}

static bool one_request(int connection, buffer *in) {
    char *end;
    while (!(end = in->length ? strstr(in->data, "\r\n\r\n") : NULL)) {
        if (in->length > MAX_HEAD || !fill(connection, in, in->length + 1)) return false;
    }
    size_t head = (size_t)(end - in->data) + 4;
    *end = 0;
    char method[16], path[1024];
    if (sscanf(in->data, "%15s %1023s", method, path) != 2) return false;
    const char *header = strcasestr(in->data, "\r\nContent-Length:");
    size_t length = header ? strtoul(header + 17, NULL, 10) : 0;
    bool keep = !strcasestr(in->data, "\r\nConnection: close") && !strstr(in->data, " HTTP/1.0");
    if (length > MAX_BODY || !fill(connection, in, head + length)) return false;
    char *body = strndup(in->data + head, length);
    if (!body) abort();
    char *query = strchr(path, '?');
    if (query) *query = 0;
    bool more = serve_request(connection, method, path, body);
    free(body);
    memmove(in->data, in->data + head + length, in->length - head - length + 1);
    in->length -= head + length;
    return more && keep;
}

static void *serve_connection(void *argument) {
    int connection = (int)(intptr_t)argument;
    buffer in = {0};
    while (one_request(connection, &in)) continue;
    free(in.data);
    close(connection);
    return NULL;
}

void serve_forever(int listener) {
    for (;;) {
        int connection = accept(listener, NULL, NULL);
        if (connection < 0) {
            if (errno == EINTR || errno == ECONNABORTED) continue;
            perror("accept");
            exit(1);
        }
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve_connection, (void *)(intptr_t)connection)) close(connection);
        else pthread_detach(thread);
    }
}
