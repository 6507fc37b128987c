/* Closed-loop HTTP/1.1 load: N connections, each sends its next request when an answer is whole.
 *
 *     load PORT PATH BODY CONNECTIONS REQUESTS FIRST
 *
 * BODY is a file with one JSON body; "########" in it becomes the number of the request, counted from FIRST, so that no two prompts are
 * equal, and each "########" after the first becomes a word of eight letters that no request had before. A connection is opened for its
 * first request and then kept; its first time to first byte includes the connect. Prints one line of JSON: answers, seconds, own CPU
 * seconds, failures, server-sent events of all streams, and the time to first byte, of whole answers and between reads of one stream, as
 * percentiles in milliseconds. An answer fails unless its status is 200 and, where it is a stream, it ends with [DONE]. SIGTERM ends it early.
 *
 * Every read turns delayed acknowledgements off (TCP_QUICKACK): a server without TCP_NODELAY would wait 40 ms for them.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

enum phase { HEAD, SIZED, CHUNK_SIZE, CHUNK, CHUNK_END, TRAILER };

struct connection {
    int fd;
    bool connecting, is_stream, after_line; /* after_line: the last byte of the body ended a line */
    enum phase phase;
    int status;
    char head[4096];
    size_t head_bytes;
    long remaining; /* bytes of the body or of the chunk */
    char digits[16];
    size_t num_digits;
    char tail[16]; /* last bytes of the body */
    size_t tail_bytes;
    double began, first, last;
    char *out;
    size_t out_bytes, sent;
};

struct series {
    float *ms;
    size_t count, room;
};

static const char DONE[] = "[DONE]\n\n";
static struct sockaddr_in server;
static const char *path;
static char *body;
static size_t body_bytes;
static long next_number, left_to_send, left_to_end, failures, stream_events;
static int poller;
static struct series first_bytes, answers, gaps;
static char failure[256];
static volatile sig_atomic_t told_to_end;

static void end_early(int signal) {
    (void)signal;
    told_to_end = 1;
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

static void die(const char *what) {
    perror(what);
    exit(2);
}

static void note(struct series *series, double seconds) {
    if (series->count == series->room) {
        series->room = series->room ? 2 * series->room : 1 << 16;
        series->ms = realloc(series->ms, series->room * sizeof(float));
        if (!series->ms) die("realloc");
    }
    series->ms[series->count++] = (float)(seconds * 1e3);
}

static void watch(struct connection *c, int operation, uint32_t events) {
    struct epoll_event event = {.events = events, .data.ptr = c};
    if (epoll_ctl(poller, operation, c->fd, &event)) die("epoll_ctl");
}

static void flush(struct connection *c) {
    while (c->sent < c->out_bytes) {
        ssize_t wrote = send(c->fd, c->out + c->sent, c->out_bytes - c->sent, MSG_NOSIGNAL);
        if (wrote < 0) {
            if (errno == EAGAIN) watch(c, EPOLL_CTL_MOD, EPOLLIN | EPOLLOUT);
            return; /* an error shows when it is read */
        }
        c->sent += wrote;
    }
    watch(c, EPOLL_CTL_MOD, EPOLLIN);
}

/* Write four syllables of a consonant and a vowel, which no other position of any request gets but by chance. */
static void write_word(char *at, unsigned long request, unsigned long position) {
    unsigned long noise = request * 0x9e3779b97f4a7c15ul + position * 0xbf58476d1ce4e5b9ul;
    noise = (noise ^ (noise >> 31)) * 0x94d049bb133111ebul;
    noise ^= noise >> 29;
    for (int i = 0; i < 8; i += 2, noise /= 100) {
        at[i] = "bcdfghjklmnprstvwxyz"[noise % 20];
        at[i + 1] = "aeiou"[noise / 20 % 5];
    }
}

static void request(struct connection *c) {
    int head = sprintf(c->out,
                       "POST %s HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %zu\r\n\r\n", path,
                       body_bytes);
    memcpy(c->out + head, body, body_bytes);
    char *mark = memmem(c->out + head, body_bytes, "########", 8);
    if (mark) {
        char number[16];
        snprintf(number, sizeof number, "%08u", (unsigned)(next_number % 100000000));
        memcpy(mark, number, 8);
    }
    char *stop = c->out + head + body_bytes;
    for (long position = 0; mark && (mark = memmem(mark, stop - mark, "########", 8)); position++) write_word(mark, next_number, position);
    next_number++;
    left_to_send--;
    c->out_bytes = head + body_bytes;
    c->sent = c->head_bytes = c->tail_bytes = 0;
    c->phase = HEAD;
    c->after_line = false;
    c->first = c->last = 0;
    if (!c->connecting) {
        c->began = now();
        flush(c);
    }
}

static void open_connection(struct connection *c) {
    c->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (c->fd < 0) die("socket");
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
    c->began = now();
    c->connecting = true;
    if (connect(c->fd, (struct sockaddr *)&server, sizeof server) && errno != EINPROGRESS) die("connect");
    watch(c, EPOLL_CTL_ADD, EPOLLIN | EPOLLOUT);
    request(c);
}

static void next_request(struct connection *c, bool reopen) {
    if (reopen || left_to_send <= 0) {
        close(c->fd);
        c->fd = -1;
    }
    if (left_to_send > 0) {
        if (reopen) open_connection(c);
        else request(c);
    }
}

static void fail(struct connection *c, const char *why) {
    if (!failures++) snprintf(failure, sizeof failure, "%s (status %d)", why, c->phase == HEAD ? 0 : c->status);
    left_to_end--;
    next_request(c, true);
}

static void end(struct connection *c) {
    double time = now();
    bool done = c->tail_bytes >= sizeof DONE - 1 && !memcmp(c->tail + c->tail_bytes - (sizeof DONE - 1), DONE, sizeof DONE - 1);
    if (c->status != 200 || (c->is_stream && !done)) {
        fail(c, c->status != 200 ? "refused" : "a stream without [DONE]");
        return;
    }
    note(&first_bytes, c->first - c->began);
    note(&answers, time - c->began);
    left_to_end--;
    next_request(c, false);
}

/* Count the empty lines that end events: JSON has no line breaks of its own. */
static void count_events(struct connection *c, const char *data, size_t size) {
    const char *stop = data + size;
    while (data < stop) {
        if (*data == '\n') {
            stream_events += c->after_line;
            c->after_line = !c->after_line;
            data++;
        } else {
            c->after_line = false;
            data = memchr(data, '\n', stop - data);
            if (!data) return;
        }
    }
}

static void take_body(struct connection *c, const char *data, size_t size) {
    if (c->is_stream) count_events(c, data, size);
    size_t room = sizeof c->tail;
    if (size >= room) {
        memcpy(c->tail, data + size - room, room);
        c->tail_bytes = room;
    } else {
        size_t keep = c->tail_bytes + size > room ? room - size : c->tail_bytes;
        memmove(c->tail, c->tail + c->tail_bytes - keep, keep);
        memcpy(c->tail + keep, data, size);
        c->tail_bytes = keep + size;
    }
}

/* Take bytes of the head; returns how many, and moves on to the body once it is whole. */
static size_t take_head(struct connection *c, const char *data, size_t size) {
    size_t before = c->head_bytes, room = sizeof c->head - 1 - before;
    size_t copied = size < room ? size : room;
    memcpy(c->head + before, data, copied);
    c->head_bytes += copied;
    c->head[c->head_bytes] = 0;
    char *stop = strstr(c->head, "\r\n\r\n");
    if (!stop) return copied;
    size_t used = stop + 4 - c->head - before;
    stop[2] = 0;
    c->status = atoi(c->head + 9);
    c->is_stream = strcasestr(c->head, "\r\ncontent-type: text/event-stream") != NULL;
    char *length = strcasestr(c->head, "\r\ncontent-length:");
    c->remaining = length ? atol(length + 17) : 0;
    c->phase = length ? SIZED : CHUNK_SIZE;
    c->num_digits = 0;
    return used;
}

/* Take received bytes; true once the answer is whole. */
static bool take(struct connection *c, const char *data, size_t size) {
    const char *stop = data + size;
    while (data < stop) {
        if (c->phase == HEAD) {
            data += take_head(c, data, stop - data);
            if (c->phase == SIZED && !c->remaining) return true;
        } else if (c->phase == SIZED || c->phase == CHUNK) {
            size_t part = c->remaining < stop - data ? c->remaining : stop - data;
            take_body(c, data, part);
            data += part;
            c->remaining -= part;
            if (!c->remaining) {
                if (c->phase == SIZED) return true;
                c->phase = CHUNK_END;
            }
        } else {
            char letter = *data++;
            if (letter == '\n') {
                if (c->phase == CHUNK_END) {
                    c->phase = CHUNK_SIZE;
                } else if (c->phase == TRAILER) {
                    if (!c->num_digits) return true;
                } else {
                    c->digits[c->num_digits] = 0;
                    c->remaining = strtol(c->digits, NULL, 16);
                    c->phase = c->remaining ? CHUNK : TRAILER;
                }
                c->num_digits = 0;
            } else if (letter != '\r' && c->num_digits < sizeof c->digits - 1) {
                c->digits[c->num_digits++] = letter;
            }
        }
    }
    return false;
}

static void readable(struct connection *c) {
    static char data[1 << 18];
    ssize_t size = recv(c->fd, data, sizeof data, 0);
    if (size < 0 && errno == EAGAIN) return;
    if (size <= 0) {
        fail(c, size ? strerror(errno) : "the connection was closed");
        return;
    }
    int on = 1;
    setsockopt(c->fd, IPPROTO_TCP, TCP_QUICKACK, &on, sizeof on);
    double time = now();
    if (!c->first) c->first = time;
    else if (c->is_stream && c->phase != HEAD) note(&gaps, time - c->last);
    c->last = time;
    if (take(c, data, size)) end(c);
}

static int by_value(const void *a, const void *b) {
    float x = *(const float *)a, y = *(const float *)b;
    return (x > y) - (x < y);
}

static void show(const char *name, struct series *series) {
    qsort(series->ms, series->count, sizeof(float), by_value);
    const struct { const char *name; double part; } shown[] = {{"p50", 0.5}, {"p99", 0.99}, {"max", 1}};
    for (int i = 0; i < 3; i++) {
        double value = series->count ? series->ms[(size_t)(shown[i].part * (series->count - 1) + 0.5)] : 0;
        printf(", \"%s_ms_%s\": %.4f", name, shown[i].name, value);
    }
}

int main(int count, char **words) {
    if (count != 7) {
        fprintf(stderr, "usage: %s PORT PATH BODY CONNECTIONS REQUESTS FIRST\n", words[0]);
        return 2;
    }
    server.sin_family = AF_INET;
    server.sin_port = htons(atoi(words[1]));
    server.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    path = words[2];
    FILE *file = fopen(words[3], "r");
    if (!file) die(words[3]);
    body = malloc(1 << 24);
    body_bytes = fread(body, 1, 1 << 24, file);
    fclose(file);
    int num_connections = atoi(words[4]);
    left_to_send = left_to_end = atol(words[5]);
    next_number = atol(words[6]);
    poller = epoll_create1(0);
    struct connection *connections = calloc(num_connections, sizeof *connections);
    double began = now();
    for (int i = 0; i < num_connections && left_to_send > 0; i++) {
        connections[i].out = malloc(body_bytes + 512);
        open_connection(&connections[i]);
    }
    struct epoll_event events[256];
    signal(SIGTERM, end_early);
    while (left_to_end > 0 && !told_to_end) {
        int ready = epoll_wait(poller, events, 256, 60000);
        if (told_to_end) break;
        if (ready <= 0) {
            fprintf(stderr, "nothing came for 60 s\n");
            return 1;
        }
        for (int i = 0; i < ready; i++) {
            struct connection *c = events[i].data.ptr;
            if (c->fd < 0) continue;
            if (events[i].events & EPOLLOUT) {
                c->connecting = false;
                flush(c);
            }
            if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) readable(c);
        }
    }
    double seconds = now() - began;
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    double cpu = used.ru_utime.tv_sec + used.ru_stime.tv_sec + (used.ru_utime.tv_usec + used.ru_stime.tv_usec) * 1e-6;
    printf("{\"answers\": %zu, \"seconds\": %.6f, \"cpu_s\": %.4f, \"failures\": %ld, \"failure\": \"%s\"", answers.count, seconds, cpu, failures, failure);
    printf(", \"events\": %ld", stream_events);
    show("ttfb", &first_bytes);
    show("answer", &answers);
    show("gap", &gaps);
    printf("}\n");
    return 0;
}
