/* Answers that can be checked: sums and products, copies, a needle, a table of questions. */
#include "stub.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static char *made(const char *text) {
    char *copy = strdup(text);
    if (!copy) abort();
    return copy;
}

/* The last "A op B" of whole numbers in the prompt. */
static bool arithmetic(const char *prompt, char *out, size_t room) {
    static const struct { const char *sign; char operation; } signs[] = {
        {"*", '*'}, {"x", '*'}, {"\xc3\x97", '*'}, {"+", '+'}, {"-", '-'}};
    bool found = false;
    for (const char *at = prompt; *at; at++) {
        if (!isdigit((unsigned char)*at) || (at > prompt && isdigit((unsigned char)at[-1]))) continue;
        char *end;
        long long left = strtoll(at, &end, 10);
        while (*end == ' ') end++;
        for (size_t i = 0; i < sizeof signs / sizeof *signs; i++) {
            size_t length = strlen(signs[i].sign);
            if (strncmp(end, signs[i].sign, length)) continue;
            const char *rest = end + length;
            while (*rest == ' ') rest++;
            if (!isdigit((unsigned char)*rest)) continue;
            long long right = strtoll(rest, NULL, 10);
            long long result = signs[i].operation == '*' ? left * right
                             : signs[i].operation == '+' ? left + right : left - right;
            if (fault("wrong-arithmetic")) result += 1;
            snprintf(out, room, "%lld", result);
            found = true;
        }
    }
    return found;
}

static const char *after(const char *text, const char *mark) {
    const char *found = strcasestr(text, mark);
    return found ? found + strlen(mark) : NULL;
}

static char *table(const char *prompt) {
    for (const json *item = config.answers ? config.answers->child : NULL; item; item = item->next)
        if (item->kind == JSON_STRING && !strcmp(item->key, prompt)) return made(item->text);
    return NULL;
}

/* The code of an earlier message that the last one asks for. */
static char *earlier_needle(const json *request, const char *prompt) {
    static const char mark[] = "secret number of the lighthouse is ";
    char number[64];
    if (!strcasestr(prompt, "secret number of the lighthouse?")) return NULL;
    const json *messages = json_get(request, "messages");
    for (const json *item = messages ? messages->child : NULL; item; item = item->next) {
        const char *text = json_text(item, "content"), *rest = text ? after(text, mark) : NULL;
        if (!rest) continue;
        snprintf(number, sizeof number, "%ld", strtol(rest, NULL, 10) + fault("stale-prefix"));
        return made(number);
    }
    return NULL;
}

static char *good_answer(const char *prompt) {
    char number[64];
    const char *rest;
    char *known = table(prompt);
    if (known) return known;
    if ((rest = after(prompt, "repeat exactly: "))) {
        char *copy = made(rest);
        size_t length = strlen(copy);
        if (fault("copy-typo") && length) copy[length / 2] = copy[length / 2] == '#' ? '%' : '#';
        return copy;
    }
    if ((rest = after(prompt, "secret number of the lighthouse is "))) {
        if (fault("needle-lost")) return made("There is no such number.");
        snprintf(number, sizeof number, "%ld", strtol(rest, NULL, 10));
        return made(number);
    }
    if (arithmetic(prompt, number, sizeof number)) return made(number);
    if (strcasestr(prompt, "capital of France")) return made("Paris");
    if (strcasestr(prompt, "capital of Japan")) return made("Tokyo");
    if (strcasestr(prompt, "How many days has a week")) return made("Seven");
    return made("This is the stub engine; it has no model and knows little.");
}

char *answer_to(const json *request, const char *prompt, int turns) {
    static atomic_long calls;
    long call = atomic_fetch_add(&calls, 1);
    if (fault("garbage")) return made("ent fjord 7 lkj the the of 0x colour; blue");
    if (fault("nan")) return made("!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!");
    if (fault("empty")) return made("");
    bool sampling = json_number(request, "temperature", 1) > 0;
    if (sampling && fault("sampler-nan")) return made("!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!!");
    if (sampling && fault("sampler-wrong")) return made("It might be raining.");
    if (fault("forgets") && turns > 1) return made("I do not remember what we talked about.");
    if (fault("mixes-up")) {
        usleep(150000); /* long enough that requests sent together meet here */
        if (atomic_load(&counted.running) > 1) return made("That was another request's answer.");
    }
    char *answer = turns > 1 ? earlier_needle(request, prompt) : NULL;
    if (!answer) answer = good_answer(prompt);
    if (fault("unsteady")) {
        buffer b = {0};
        put(&b, "%s%.*s", answer, (int)(call % 3) + 1, "...");
        free(answer);
        return b.data;
    }
    return answer;
}
