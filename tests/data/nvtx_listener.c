/* A profiler in a few lines: NVTX loads it through NVTX_INJECTION64_PATH, and it writes every
 * range of a domain to the file that NVTX_LISTENER_FILE names, one line a push or a pop.
 * Layouts and numbers are those of NVTX 3 (nvToolsExt.h, nvtxTypes.h). */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { CALLBACKS_TABLE = 1, CORE2_MODULE = 5, INT64_PAYLOAD = 2, REGISTERED_MESSAGE = 3 };
enum { PUSH = 4, POP = 5, NAME_CATEGORY = 8, REGISTER_STRING = 10, CREATE_DOMAIN = 12 };

typedef struct {
    uint16_t version, size;
    uint32_t category;
    int32_t color_type;
    uint32_t color;
    int32_t payload_type, reserved;
    int64_t payload;
    int32_t message_type;
    const char *message;
} event_t;

typedef struct {
    size_t struct_size;
    int (*module_functions)(int module, void ***functions, unsigned *size);
} callbacks_t;

static FILE *out;

static const char *create_domain(const char *name) {
    fprintf(out, "domain %s\n", name);
    return name;
}

static const char *register_string(void *domain, const char *text) { return text; }

static void name_category(const char *domain, uint32_t category, const char *name) {
    fprintf(out, "category %u %s\n", category, name);
}

static int push(const char *domain, const event_t *event) {
    if (event->message_type != REGISTERED_MESSAGE || event->payload_type != INT64_PAYLOAD)
        fprintf(out, "odd event\n");
    else
        fprintf(out, "push %s %s %u %lld\n", domain, event->message, event->category,
                (long long)event->payload);
    fflush(out);
    return 0;
}

static int pop(const char *domain) {
    fprintf(out, "pop %s\n", domain);
    fflush(out);
    return 0;
}

int InitializeInjectionNvtx2(const void *(*export_table)(uint32_t)) {
    const callbacks_t *callbacks = export_table(CALLBACKS_TABLE);
    void **functions = NULL;
    unsigned size = 0;
    out = fopen(getenv("NVTX_LISTENER_FILE"), "w");
    if (!out || !callbacks || !callbacks->module_functions(CORE2_MODULE, &functions, &size))
        return 0;
    *(void **)functions[PUSH] = (void *)push;
    *(void **)functions[POP] = (void *)pop;
    *(void **)functions[NAME_CATEGORY] = (void *)name_category;
    *(void **)functions[REGISTER_STRING] = (void *)register_string;
    *(void **)functions[CREATE_DOMAIN] = (void *)create_domain;
    return 1;
}

#ifdef REFUSES_EXTENSIONS
/* As Nsight Systems 2023.4 does with newer forms of the payload extension. */
int InitializeInjectionNvtxExtension(void *module) { return 0; }
#endif
