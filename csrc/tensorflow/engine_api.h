#pragma once

/* What the engine's Python module offers to libraries of operators, in plain C: neither side sees
 * the other's C++ types, so each may be built for itself. The module gives the address of a table
 * (`engine_api()`), and Python passes it on. */

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define HVDO_ENGINE_API_VERSION 1

/* A gradient that is exchanged: number of the exchange, then of the gradient in it. */
typedef struct {
  uint32_t exchange;
  uint32_t index;
} hvdo_position;

enum hvdo_error_kind {
  HVDO_MISTAKE = 1,    /* the caller's */
  HVDO_COLLECTIVE = 2, /* a rank is gone, late, or the job has failed */
  HVDO_NOT_THERE = 3,  /* init() was not called, or shutdown() was */
  HVDO_INTERNAL = 4
};

/* The text begins with the name of the Python exception: "PeerLost: rank 1 is gone ...". */
typedef void (*hvdo_failed)(void* context, int kind, const char* text);

/* Who takes a sum. `receive` copies it; then, or after an error, one of the others is called, from
 * any thread, and nothing after that. */
typedef struct {
  void* context;
  void (*receive)(void* context, const void* sum, size_t size_bytes);
  void (*done)(void* context);
  hvdo_failed failed;
} hvdo_taker;

typedef struct {
  uint32_t version;
  uint32_t size_bytes; /* of this table: fields are only ever added at its end */
  /* Hands over a gradient; returns when it is copied: 1, or 0 after calling `failed`. */
  int (*post)(
      hvdo_position position,
      const void* gradient,
      size_t size_bytes,
      void* context,
      hvdo_failed failed);
  /* Asks for the sum of what was posted; returns at once. */
  void (*take)(hvdo_position position, const hvdo_taker* taker);
} hvdo_engine_api;

#ifdef __cplusplus
}
#endif
