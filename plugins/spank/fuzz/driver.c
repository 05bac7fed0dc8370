/*
 * Replacement for libFuzzer where clang is missing: runs the corpus, then mutations of it that a
 * seed determines. Takes -runs=N, -seed=N, -max_total_time=SECONDS and directories or files as
 * libFuzzer does; without -runs and -max_total_time it only runs the files.
 */

#include <dirent.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

enum { MAX_BYTES = 4000, MAX_FILES = 4096 };

static struct {
	uint8_t *data;
	size_t size;
} corpus[MAX_FILES];
static int corpus_count;

/* Inserted by mutations: values, options, and what printing or splitting them could trip over. */
static const char *const words[] = {
	"2-16", "2-4", "types=a100", "%", "%s", "%n", "\x1b[31m", "\n", "--elastic=", "--elastic",
	"--elasti", "--el", "--e", "=", "\x01", "\xff", "\x7f", " ", "\t", "?",
};

static uint64_t state;

/* Return a random number below the limit (xorshift64*). */
static size_t draw(size_t limit)
{
	state ^= state >> 12;
	state ^= state << 25;
	state ^= state >> 27;
	return ((size_t)((state * UINT64_C(2685821657736338717)) >> 33) % limit);
}

static void load(const char *path)
{
	struct stat status;
	FILE *file;

	if (stat(path, &status) != 0) {
		perror(path);
		exit(2);
	}
	if (S_ISDIR(status.st_mode)) {
		struct dirent **names;
		int count = scandir(path, &names, NULL, alphasort);

		for (int i = 0; i < count; ++i) {
			char below[4096];

			snprintf(below, sizeof(below), "%s/%s", path, names[i]->d_name);
			if (names[i]->d_name[0] != '.')
				load(below);
			free(names[i]);
		}
		free(names);
		return;
	}
	if (corpus_count == MAX_FILES || status.st_size > MAX_BYTES ||
	    (file = fopen(path, "rb")) == NULL)
		return;
	corpus[corpus_count].data = malloc((size_t)status.st_size + 1);
	corpus[corpus_count].size = fread(corpus[corpus_count].data, 1, (size_t)status.st_size, file);
	corpus_count++;
	fclose(file);
}

static size_t insert(uint8_t *data, size_t size, size_t at, const void *piece, size_t length)
{
	if (size + length > MAX_BYTES)
		return (size);
	memmove(data + at + length, data + at, size - at);
	memcpy(data + at, piece, length);
	return (size + length);
}

static size_t mutate(uint8_t *data, size_t size)
{
	size_t at = draw(size + 1), count;
	uint8_t byte = (uint8_t)draw(256);

	switch (draw(6)) {
	case 0: {
		const char *word = words[draw(sizeof(words) / sizeof(words[0]))];

		return (insert(data, size, at, word, strlen(word)));
	}
	case 1:
		return (insert(data, size, at, &byte, 1));
	case 2: /* change a byte */
		if (at < size)
			data[at] = byte;
		return (size);
	case 3: /* remove some */
		count = draw(size - at + 1);
		memmove(data + at, data + at + count, size - at - count);
		return (size - count);
	case 4: { /* a piece of another input */
		int other = (int)draw((size_t)corpus_count);
		size_t from = draw(corpus[other].size + 1);

		return (insert(data, size, at, corpus[other].data + from,
			       draw(corpus[other].size - from + 1)));
	}
	default: { /* many of one byte */
		uint8_t many[300];

		count = draw(sizeof(many));
		memset(many, byte, sizeof(many));
		return (insert(data, size, at, many, count));
	}
	}
}

int main(int argc, char **argv)
{
	long runs = 0, seconds = 0, done = 0;
	static uint8_t buffer[MAX_BYTES];
	time_t end;

	state = 1;
	for (int i = 1; i < argc; ++i)
		if (sscanf(argv[i], "-runs=%ld", &runs) != 1 &&
		    sscanf(argv[i], "-seed=%lu", (unsigned long *)&state) != 1 &&
		    sscanf(argv[i], "-max_total_time=%ld", &seconds) != 1 && argv[i][0] != '-')
			load(argv[i]);
	if (corpus_count == 0) {
		fprintf(stderr, "driver: no inputs: name the corpus\n");
		return (2);
	}
	state = state * UINT64_C(0x9e3779b97f4a7c15) + 1;
	for (int i = 0; i < corpus_count; ++i)
		LLVMFuzzerTestOneInput(corpus[i].data, corpus[i].size);
	end = time(NULL) + seconds;
	while (done < runs || (seconds > 0 && time(NULL) < end)) {
		int base = (int)draw((size_t)corpus_count);
		size_t size = corpus[base].size;

		memcpy(buffer, corpus[base].data, size);
		for (size_t steps = 1 + draw(5); steps > 0; --steps)
			size = mutate(buffer, size);
		LLVMFuzzerTestOneInput(buffer, size);
		done++;
	}
	printf("inputs: %ld\n", corpus_count + done);
	for (int i = 0; i < corpus_count; ++i)
		free(corpus[i].data);
	return (0);
}
