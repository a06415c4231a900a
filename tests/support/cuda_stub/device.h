/* What the stub libraries share (device.c, streams.c): memory, streams, events, recordings, counts, and faults on demand.
   Errors are numbers of CUDA's, which are the same in the driver's and in the runtime's API. */
#pragma once
#include <stddef.h>
#include <stdint.h>

enum {
    OK = 0, INVALID_VALUE = 1, NO_MEMORY = 2, INVALID_PITCH = 12, INVALID_DEVICE = 101, NO_CONTEXT = 201,
    INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, LAUNCH_FAILED = 701, DEVICE_LOST = 719,
    WHILE_RECORDING = 900, RECORDING_BROKEN = 901
};
enum { PAGEABLE, PINNED, ON_DEVICE };                                /* where an address points to */
enum { HOST_TO_HOST, HOST_TO_DEVICE, DEVICE_TO_HOST, DEVICE_TO_DEVICE, BY_ADDRESS }; /* as cudaMemcpyKind */
typedef struct { unsigned x, y, z; } dim;
typedef struct stream stream;
typedef struct event event;
typedef struct graph graph;

/* -- counts: every call by its name, with how many bytes it moves; what CUDA would refuse begins with WRONG -- */
void note(const char *name, long bytes);
int fails_on_demand(const char *name);     /* the error with which this call ends, where a test wants it to, else OK */
#define NOTE(bytes) do { note(__func__, (long)(bytes)); int fails = fails_on_demand(__func__); if (fails) return fails; } while (0)
void wrong(const char *what, const char *who);

/* -- devices -- */
int device_count(void);
int is_part(int device); /* of a GPU (MIG) */
int compute_capability(void);
void holds(int more);                      /* pools and modules that somebody was given, or has given back */
void library_holds(int more);              /* and what libraries have made for somebody */
size_t total_bytes(void);
size_t free_bytes(int device);
int current_device(void);                  /* of the calling thread; -1 where none was set */
int make_current(int device);
int lost(void);                            /* the error of the current device where it is lost, else OK */
const char *error_name(int error);

/* -- memory -- */
int allocate(void **address, size_t bytes, int where);
int release(void *address, int where, const char *who);
int where_is(const void *address, int *device);

/* -- streams: work is done late, in order, when somebody waits for it -- */
int make_stream(stream **made);
int end_stream(stream *s);
int wait_for_stream(stream *s, const char *who);
int wait_for_all(void);
int wait_for_device(const char *who);       /* which breaks what is recorded there */
int stream_is_recording(stream *s);
int copy(const char *who, stream *s, void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t bytes,
         size_t rows, int kind, int waits);
int copy_3d(const char *who, stream *s, void *to, const size_t to_pitch[2], const void *from,
            const size_t from_pitch[2], const size_t extent[3], int kind);
int set(const char *who, stream *s, void *to, size_t pitch, int value, size_t bytes, size_t rows);
int launch(stream *s, const char *kernel, dim grid, dim block, void (*run)(void *), void *argument);
int make_event(event **made, int timed);
int end_event(event *e);
int record_event(event *e, stream *s);
int wait_for_event(event *e);
int event_reached(event *e);
int elapsed(event *begin, event *end, float *milliseconds);
int stream_waits_for(stream *s, event *e);
int begin_recording(stream *s);
int end_recording(stream *s, graph **made);
int instantiate(graph **made, graph *from);
int replay(graph *executable, stream *s);
int end_graph(graph *g);
void *real(const void *address);           /* where this process may touch it */
