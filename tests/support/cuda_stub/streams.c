/* Streams, events and recordings of the stub's devices: work is done late, in order, when somebody waits for it. */
#include "control.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct work { int what; void *to; const void *from; size_t bytes, rows, to_pitch, from_pitch; int value;
              void (*run)(void *); void *argument; struct work *next; };
struct graph { int magic, executable, broken; struct work *first, **last; };
struct stream { int magic, device; graph *recording; struct work *first, **last; long asked, done; stream *next; };
struct event { int magic, device, timed; stream *on; long at; };
enum { STREAM = 0x57e4, EVENT = 0xe7e7, GRAPH = 0x64a9 };
static stream *streams, standard[DEVICES];

static stream *known(stream *s, const char *who) {
    if ((uintptr_t)s < 4096) { /* the default stream */
        int d = current_device() < 0 ? 0 : current_device();
        s = &standard[d];
        if (!s->magic) *s = (stream){STREAM, d, NULL, NULL, NULL, 0, 0, streams}, s->last = &s->first, streams = s;
    }
    if (s->magic == STREAM) return s;
    wrong("not a stream, or destroyed", who);
    return NULL;
}

static void perform(const struct work *w) {
    if (w->what == 's')
        for (size_t i = 0; i < w->rows; i++) memset((char *)real(w->to) + i * w->to_pitch, w->value, w->bytes);
    else if (w->what == 'c')
        for (size_t i = 0; i < w->rows; i++)
            memmove((char *)real(w->to) + i * w->to_pitch, (char *)real(w->from) + i * w->from_pitch, w->bytes);
    else if (w->what == 'k' && w->run) w->run(w->argument);
}

static void perform_until(stream *s, long number) {
    while (s->first && s->done < number) {
        struct work *w = s->first;
        perform(w);
        s->done++;
        if (!(s->first = w->next)) s->last = &s->first;
        free(w);
    }
}

static void ask(stream *s, struct work w) {
    struct work *kept = malloc(sizeof *kept);
    *kept = w, kept->next = NULL;
    if (s->recording) { *s->recording->last = kept, s->recording->last = &kept->next; return; }
    *s->last = kept, s->last = &kept->next, s->asked++;
}

/* Begins a function that works on a stream: it is known, of the current device, and that is there. */
#define ON(s, who) \
    pthread_mutex_lock(&lock); \
    int error = lost(); \
    s = error ? NULL : known(s, who); \
    if (!error && !s) error = INVALID_HANDLE; \
    if (!error && s->device != current_device()) { wrong("a stream of another device", who); error = INVALID_HANDLE; } \
    if (error) { pthread_mutex_unlock(&lock); return error; }
#define DONE(result) do { int value = (result); pthread_mutex_unlock(&lock); return value; } while (0)

int make_stream(stream **made) {
    if (current_device() < 0) return NO_CONTEXT;
    if (lost()) return lost();
    pthread_mutex_lock(&lock);
    stream *s = calloc(1, sizeof *s);
    *s = (stream){STREAM, current_device(), NULL, NULL, NULL, 0, 0, streams}, s->last = &s->first, streams = s;
    control->streams++;
    *made = s;
    DONE(OK);
}
int end_stream(stream *s) {
    pthread_mutex_lock(&lock);
    s = known(s, "destroying a stream");
    if (!s) DONE(INVALID_HANDLE);
    perform_until(s, s->asked);
    if (s->recording) end_graph(s->recording), s->recording = NULL; /* of a device that was lost meanwhile */
    s->magic = 0; /* kept, so that its use is noticed */
    control->streams--;
    DONE(lost());
}
int stream_is_recording(stream *s) { s = known(s, "asking a stream"); return s && s->recording; }
int wait_for_stream(stream *s, const char *who) {
    ON(s, who)
    if (s->recording) { wrong("waiting while recording", who); DONE(WHILE_RECORDING); }
    perform_until(s, s->asked);
    DONE(OK);
}
int wait_for_all(void) {
    pthread_mutex_lock(&lock);
    for (stream *s = streams; s; s = s->next)
        if (s->magic == STREAM) perform_until(s, s->asked);
    DONE(lost());
}
/* Refused while any stream of the device is recorded, on whichever thread; and then that recording is worth nothing.
   Not counted as wrong: ONNX Runtime asks for it where a run fails, also within a recording, which is lost then anyway. */
int wait_for_device(const char *who) {
    pthread_mutex_lock(&lock);
    int recorded = 0;
    for (stream *s = streams; s; s = s->next)
        if (s->magic == STREAM && s->recording && s->device == current_device()) recorded = s->recording->broken = 1;
    if (recorded) { note("waiting for a device that records", 0); DONE(WHILE_RECORDING); }
    DONE(wait_for_all());
}

static const char *kinds[] = {"H2H", "H2D", "D2H", "D2D"};

static int checked_copy(const char *who, stream *s, const void *to, size_t to_bytes, const void *from, size_t from_bytes,
                        size_t bytes, int kind, int *pageable) {
    int source = where_is(from, NULL), target = where_is(to, NULL);
    int found = (source == ON_DEVICE ? 2 : 0) + (target == ON_DEVICE);
    *pageable = found != DEVICE_TO_DEVICE && found != HOST_TO_HOST && (source == PAGEABLE || target == PAGEABLE);
    char text[104];
    snprintf(text, sizeof text, "copy %s%s", kinds[found], *pageable ? " pageable" : "");
    note(text, bytes);
    if (kind != BY_ADDRESS && kind != found) { wrong("the wrong kind of copy", who); return INVALID_VALUE; }
    if (!inside(who, to, to_bytes) || !inside(who, from, from_bytes)) return INVALID_VALUE;
    if (*pageable && s->recording) { wrong("pageable memory while recording", who); return WHILE_RECORDING; }
    return OK;
}

int copy(const char *who, stream *s, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes,
         size_t rows, int kind, int waits) {
    if (!bytes || !rows) return OK;
    ON(s, who)
    if (rows > 1 && (bytes > to_pitch || bytes > from_pitch)) { wrong("a row longer than its pitch", who); DONE(INVALID_PITCH); }
    int pageable;
    error = checked_copy(who, s, to, (rows - 1) * to_pitch + bytes, from, (rows - 1) * from_pitch + bytes, rows * bytes, kind, &pageable);
    if (error) DONE(error);
    if (waits && s->recording) { wrong("waiting while recording", who); DONE(WHILE_RECORDING); }
    if (where_is(to, NULL) == ON_DEVICE && where_is(from, NULL) == ON_DEVICE && rows == 1 && (char *)to < (char *)from + bytes && (char *)from < (char *)to + bytes && to != from)
        wrong("the places of a copy overlap", who);
    ask(s, (struct work){'c', to, from, bytes, rows, to_pitch, from_pitch});
    if (pageable || waits) perform_until(s, s->asked); /* as CUDA does, or may do */
    if (waits) note("wait for a copy", 0);
    DONE(OK);
}

int copy_3d(const char *who, stream *s, void *to, const size_t to_pitch[2], const void *from, const size_t from_pitch[2],
            const size_t extent[3], int kind) {
    if (!extent[0] || !extent[1] || !extent[2]) return OK;
    ON(s, who)
    int pageable;
    size_t last = extent[2] - 1, row = extent[1] - 1;
    error = checked_copy(who, s, to, last * to_pitch[1] + row * to_pitch[0] + extent[0], from,
                         last * from_pitch[1] + row * from_pitch[0] + extent[0], extent[0] * extent[1] * extent[2], kind, &pageable);
    if (error) DONE(error);
    for (size_t i = 0; i < extent[2]; i++)
        ask(s, (struct work){'c', (char *)to + i * to_pitch[1], (char *)from + i * from_pitch[1], extent[0], extent[1], to_pitch[0], from_pitch[0]});
    if (pageable) perform_until(s, s->asked);
    DONE(OK);
}

int set(const char *who, stream *s, void *to, size_t pitch, int value, size_t bytes, size_t rows) {
    if (!bytes || !rows) return OK;
    ON(s, who)
    note("set", (long)(bytes * rows));
    if (where_is(to, NULL) != ON_DEVICE) { wrong("not the device's memory", who); DONE(INVALID_VALUE); }
    if (!inside(who, to, (rows - 1) * pitch + bytes)) DONE(INVALID_VALUE);
    ask(s, (struct work){'s', to, NULL, bytes, rows, pitch, 0, value});
    DONE(OK);
}

int launch(stream *s, const char *kernel, dim grid, dim block, void (*run)(void *), void *argument) {
    ON(s, "launching a kernel")
    control->launches++;
    note("kernel launch", (long)grid.x * grid.y * grid.z * block.x * block.y * block.z); /* threads */
    if (kernel && getenv("CUDA_STUB_KERNELS")) note(kernel, (long)grid.x * grid.y * grid.z * block.x * block.y * block.z);
    if (control->fail_launch && --control->fail_launch == 0) DONE(LAUNCH_FAILED);
    if ((error = fails_on_demand("kernel launch"))) DONE(error);
    if (!grid.x || !grid.y || !grid.z || !block.x || block.x * block.y * block.z > 1024) { wrong("a grid that is none", kernel ? kernel : "a kernel"); DONE(INVALID_VALUE); }
    ask(s, (struct work){.what = 'k', .run = run, .argument = argument});
    DONE(OK);
}

int make_event(event **made, int timed) {
    if (current_device() < 0) return NO_CONTEXT;
    if (lost()) return lost();
    pthread_mutex_lock(&lock);
    event *e = calloc(1, sizeof *e);
    *e = (event){EVENT, current_device(), timed, NULL, 0};
    control->events++;
    *made = e;
    DONE(OK);
}
static int is_event(event *e, const char *who) {
    if (e && e->magic == EVENT) return 1;
    wrong("not an event, or destroyed", who);
    return 0;
}
int end_event(event *e) {
    pthread_mutex_lock(&lock);
    if (!is_event(e, "destroying an event")) DONE(INVALID_HANDLE);
    e->magic = 0;
    control->events--;
    DONE(lost());
}
int record_event(event *e, stream *s) {
    ON(s, "recording an event")
    if (!is_event(e, "recording an event")) DONE(INVALID_HANDLE);
    if (e->device != s->device) { wrong("an event of another device", "recording an event"); DONE(INVALID_HANDLE); }
    e->on = s, e->at = s->asked;
    DONE(OK);
}
int wait_for_event(event *e) {
    pthread_mutex_lock(&lock);
    if (lost()) DONE(lost());
    if (!is_event(e, "waiting for an event")) DONE(INVALID_HANDLE);
    if (e->on && e->on->recording) { wrong("waiting while recording", "waiting for an event"); DONE(WHILE_RECORDING); }
    if (e->on) perform_until(e->on, e->at);
    DONE(OK);
}
int event_reached(event *e) {
    pthread_mutex_lock(&lock);
    if (!is_event(e, "asking for an event")) DONE(INVALID_HANDLE);
    DONE(e->on && e->on->done < e->at ? NOT_READY : OK);
}
/* A piece of work takes a microsecond. */
int elapsed(event *begin, event *end, float *milliseconds) {
    pthread_mutex_lock(&lock);
    if (lost()) DONE(lost());
    if (!is_event(begin, "measuring") || !is_event(end, "measuring")) DONE(INVALID_HANDLE);
    if (!begin->timed || !end->timed || !begin->on || begin->on != end->on) { wrong("events that measure nothing", "measuring"); DONE(INVALID_HANDLE); }
    if (end->on->done < end->at) DONE(NOT_READY);
    *milliseconds = 1e-3f * (end->at - begin->at);
    DONE(OK);
}
int stream_waits_for(stream *s, event *e) {
    ON(s, "a stream that waits")
    if (!is_event(e, "a stream that waits")) DONE(INVALID_HANDLE);
    if (e->on && e->on != s) perform_until(e->on, e->at);
    DONE(OK);
}

static graph *make_graph(int executable) {
    graph *g = calloc(1, sizeof *g);
    *g = (graph){GRAPH, executable, 0, NULL, NULL}, g->last = &g->first;
    control->graphs++;
    return g;
}
int begin_recording(stream *s) {
    ON(s, "recording")
    if (s->recording) { wrong("it records already", "recording"); DONE(WHILE_RECORDING); }
    s->recording = make_graph(0);
    DONE(OK);
}
int end_recording(stream *s, graph **made) {
    if (lost() && s->recording) end_graph(s->recording), s->recording = NULL;
    ON(s, "recording")
    if (!s->recording) { wrong("nothing is recorded", "recording"); DONE(INVALID_VALUE); }
    *made = s->recording, s->recording = NULL;
    if ((*made)->broken) { end_graph(*made); *made = NULL; DONE(RECORDING_BROKEN); }
    DONE(OK);
}
int instantiate(graph **made, graph *from) {
    pthread_mutex_lock(&lock);
    if (!from || from->magic != GRAPH) { wrong("not a graph, or destroyed", "instantiating"); DONE(INVALID_HANDLE); }
    if (refused_on_demand()) DONE(NO_MEMORY); /* it takes memory of the device, too */
    graph *g = make_graph(1);
    for (struct work *w = from->first; w; w = w->next) {
        struct work *kept = malloc(sizeof *kept);
        *kept = *w, kept->next = NULL, *g->last = kept, g->last = &kept->next;
    }
    *made = g;
    DONE(OK);
}
int replay(graph *g, stream *s) {
    ON(s, "replaying")
    if (!g || g->magic != GRAPH || !g->executable) { wrong("not an executable graph, or destroyed", "replaying"); DONE(INVALID_HANDLE); }
    for (struct work *w = g->first; w; w = w->next) {
        if (w->what != 'k' && !(inside("replaying", w->to, w->bytes) && (!w->from || inside("replaying", w->from, w->bytes)))) DONE(INVALID_VALUE);
        ask(s, *w);
    }
    DONE(OK);
}
int end_graph(graph *g) {
    pthread_mutex_lock(&lock);
    if (!g || g->magic != GRAPH) { wrong("not a graph, or destroyed", "destroying a graph"); DONE(INVALID_HANDLE); }
    g->magic = 0;
    control->graphs--;
    DONE(OK);
}
