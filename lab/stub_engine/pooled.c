/* Embeddings, rankings, classes: words counted in a few buckets, so that like texts are near. */
#include "stub.h"

#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#define WIDTH 128 /* of lab/model/published.py's encoder */

/* Fills the buckets of a text's words; a fault gives every text the same numbers. */
static void embed(const char *text, int place, double *numbers) {
    memset(numbers, 0, WIDTH * sizeof *numbers);
    if (fault("garbage")) numbers[0] = 1;
    else if (fault("mixes-up")) numbers[place % WIDTH] = 1;
    else
        for (const char *at = text; *at;) {
            unsigned hash = 5381;
            while (*at && !isalnum((unsigned char)*at)) at++;
            if (!*at) break;
            while (isalnum((unsigned char)*at)) hash = hash * 33 + (unsigned)tolower((unsigned char)*at++);
            numbers[hash % WIDTH] += 1;
        }
}

static int put_embedding(buffer *b, const char *text, int place) {
    double numbers[WIDTH];
    embed(text, place, numbers);
    put(b, "%s{\"object\":\"embedding\",\"index\":%d,\"embedding\":[", place ? "," : "", place);
    int width = fault("wrong-context") ? WIDTH / 2 : WIDTH;
    for (int i = 0; i < width; i++)
        if (fault("nan")) put(b, "%snull", i ? "," : "");
        else put(b, "%s%g", i ? "," : "", numbers[i]);
    put(b, "]}");
    return (int)strlen(text) / 4 + 1;
}

static double likeness(const char *one, const char *other) {
    double left[WIDTH], right[WIDTH], sum = 0;
    embed(one, 0, left);
    embed(other, 1, right);
    for (int i = 0; i < WIDTH; i++) sum += left[i] * right[i];
    return sum;
}

/* Three classes by a text's letters; a fault gives numbers that are no probabilities. */
static int put_classes(buffer *b, const char *text, int place) {
    double counts[3] = {1, 1, 1}, sum = 3;
    for (const char *at = text; *at && !fault("garbage"); at++, sum++) counts[(unsigned char)*at % 3] += 1;
    put(b, "%s{\"index\":%d,\"label\":\"LABEL_0\",\"num_classes\":3,\"probs\":[", place ? "," : "", place);
    for (int i = 0; i < 3; i++) {
        int at = fault("mixes-up") ? (i + place) % 3 : i;
        if (fault("nan")) put(b, "%snull", i ? "," : "");
        else put(b, "%s%.9f", i ? "," : "", counts[at] / sum);
    }
    put(b, "]}");
    return (int)strlen(text) / 4 + 1;
}

/* The answer to a request for numbers; how many tokens were read. */
int put_pooled(buffer *b, const json *request, const char *path) {
    int read = 0, place = 0;
    if (strstr(path, "embeddings") || strstr(path, "classify")) {
        int (*put_one)(buffer *, const char *, int) = strstr(path, "classify") ? put_classes : put_embedding;
        const json *input = json_get(request, "input");
        put(b, "{\"object\":\"list\",\"data\":[");
        if (input && input->kind == JSON_STRING) read += put_one(b, input->text, 0);
        for (const json *item = input ? input->child : NULL; item; item = item->next)
            if (item->kind == JSON_STRING) read += put_one(b, item->text, place++);
    } else {
        const char *query = json_text(request, "query");
        const json *documents = json_get(request, "documents");
        put(b, "{\"results\":[");
        for (const json *item = documents ? documents->child : NULL; item; item = item->next, place++) {
            if (item->kind != JSON_STRING || !query) continue;
            read += (int)(strlen(item->text) + strlen(query)) / 4 + 1;
            put(b, "%s{\"index\":%d,\"relevance_score\":%g}", place ? "," : "", place, likeness(query, item->text));
        }
    }
    put(b, "],\"model\":\"%s\",\"usage\":{\"prompt_tokens\":%d,\"total_tokens\":%d}}", config.names[0], read, read);
    return read;
}
