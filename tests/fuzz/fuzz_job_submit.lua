-- Submits and modifies random jobs through job_submit.lua as slurmctld would, and checks what it
-- may do to them. Arguments: the directory of the modules, a seed, the number of jobs. Prints
-- every record written, in hexadecimal, with the directive that it stands for; an error ends it.

local directory, seed, jobs = arg[1], tonumber(arg[2]), tonumber(arg[3])
-- Instructions that one call may take: about a tenth of a second.
local MAX_INSTRUCTIONS = 5000000

math.randomseed(seed)
local function draw(list)
	return list[math.random(#list)]
end
local function chance(percent)
	return math.random(100) <= percent
end

-- A Slurm that keeps what it is told -------------------------------------------------------------

local said, logged = {}, {}
slurm = { SUCCESS = 0, ERROR = -1 }
function slurm.log_user(...)
	said[#said + 1] = string.format(...)
end
function slurm.log_error(...)
	logged[#logged + 1] = string.format(...)
end

-- job_desc: reads what the user gave, takes only what slurmctld would.
local WRITABLE = {
	admin_comment = "string", comment = "string", max_nodes = "number", min_nodes = "number",
	num_tasks = "number", requeue = "number", tres_per_job = "string", tres_per_node = "string",
	tres_per_socket = "string", tres_per_task = "string",
}
local function description(fields)
	local changed = {}
	return setmetatable({}, {
		__index = function(_, name)
			if changed[name] ~= nil then
				return changed[name]
			end
			return fields[name]
		end,
		__newindex = function(_, name, value)
			assert(WRITABLE[name], "writes " .. name)
			assert(type(value) == WRITABLE[name], name .. " becomes a " .. type(value))
			assert(type(value) ~= "number" or value >= 0 and value < 2 ^ 32 and value % 1 == 0,
				name .. " becomes " .. tostring(value))
			changed[name] = value
		end,
	}), changed
end

-- What users write --------------------------------------------------------------------------------

local HOSTILE = {
	"", " ", "\n", "\27[31mred", "\255\254", "a\nb", "%s%n%d", "%", "$(id)", ";", "'", '"', "\\",
	"--", "=", ",", ",,,", "[", "]", "[]", "((", "*", "../..", ("x"):rep(300), ("x"):rep(70000),
	("a,"):rep(3000), "\226\128\174", "1e999", "nan", "-1", "{}", "nil", "\\u0041",
}
local NUMBERS = {
	0, 1, 2, 3, 4, 7, 8, 16, 65533, 65534, 65535, 65536, 1000000, 2147483648, 2147483658,
	4294967293, 4294967294, 4294967295, 2 ^ 53 - 1, 2 ^ 53, 2 ^ 63, 2 ^ 64,
}
local DIRECTIVES = {
	"2-16", "1", "4-16,types=a100:v100", "8-64,unit=8", "2-16,unit=a100:2/v100:8", "16-2", "",
	"2-16,batch=256-4096,parallel=hybrid,freeze=auto,max-penalty=0.5%,notice=60", "65536",
	"1-65536", "2-16,types=", "2,types=mig", "x", "6-16,types=h100", "7-7", "3-5,types=v100:a100",
	"1-8,sizes=1:2:4", "2-16,sizes=6:12,types=v100:a100", "1-16,sizes=8:2,unit=a100:2/v100:8",
	"1-65536,sizes=1:65536", "1-8,sizes=9", "2-8,plan=auto",
}
local GRES = {
	"gres/gpu:2", "gres/gpu", "gres/gpu:a100:4", "gres/gpu:a100", "gres:gpu:2", "gres/gpu=1",
	"cpu=2,gres/gpu=1", "gres/gpu:v100:8", "gres/gpu:a100:1,gres/gpu:v100:1", "gres/gpu:1k",
	"gres/shard:2", "license/x:1", "gres/gpu:0", "gres/gpu:99999999999999999999", "gres/gpu::",
	"gres/gpu:a100_1g.5gb:1", "gres/gpu:\27[1m:2", "gres/gpu:a\nb:2", "gres/gpu:2K", "gres/",
	"gres/gpu:-1", "gres/gpu:a100=3", "gres/gpu:a:b:c:1", "gres", "gres/gpu:1.5",
}
local NODES = {
	"g01", "g[01-02]", "g[01-03],x", "g[1-999999999]", "g[1-999999999][]", "g[2-1]",
	"g[1-9999][2-1]", "g[a-b]", "g[", "g]", "[1-2][3-4]", ("[1-9]"):rep(40), ("[1]"):rep(5000),
	"g[1-3" .. ("0"):rep(120) .. "]", "g[9007199254740992-9007199254740994]", "ALL", "all",
}
local RESERVATIONS = {
	"mine", "selastic_7", "a,selastic_7", "selastic_", " selastic_7", "SELASTIC_7", "selastic",
	"myselastic_7", "a\nselastic_7", "\tselastic_7,",
}
local FORGED = {
	'{"elastic":"1-999","shape":{},"v":1}', '{"at":1,"elastic":"1-999","shape":{},"v":1}',
	' {\n"elastic" : "2"}', '{"ticket": 7}', '{"v":1,"elastic":"1-999"}', "{", '{"at":x,"elastic"',
}
local NUMBER_FIELDS = {
	"begin_time", "contiguous", "core_spec", "cores_per_socket", "cpus_per_task", "max_nodes",
	"min_mem_per_cpu", "min_mem_per_node", "min_nodes", "nice", "ntasks_per_node",
	"ntasks_per_socket", "ntasks_per_tres", "num_tasks", "pn_min_cpus", "pn_min_tmp_disk",
	"req_switch", "shared", "sockets_per_node", "threads_per_core", "time_limit", "time_min",
	"wait4switch",
}
local SHORT = {
	contiguous = 0, begin_time = 0, core_spec = 65534, cores_per_socket = 65534,
	cpus_per_task = 65534, ntasks_per_node = 65534, ntasks_per_socket = 65534,
	ntasks_per_tres = 65534, pn_min_cpus = 65534, shared = 65534, sockets_per_node = 65534,
	threads_per_core = 65534,
}
local STRING_FIELDS = {
	"account", "burst_buffer", "cpus_per_tres", "dependency", "exc_nodes", "extra", "features",
	"licenses", "mem_per_tres", "name", "network", "partition", "prefer", "qos", "tres_bind",
	"tres_freq", "work_dir", "std_out", "argv", "wckey",
}
local PARTITIONS = {
	{}, { all = { nodes = "ALL", flag_default = 1 } },
	{ small = { nodes = "g[01-02]", flag_default = 1 }, large = { nodes = "g03", flag_default = 0 } },
	{ none = { flag_default = 1 }, all = { nodes = "g[01-03]", flag_default = 0 } },
}

local function directive_text(odd)
	local text = draw(DIRECTIVES)
	if chance(2 * odd) then
		text = text .. "," .. draw(DIRECTIVES)
	end
	if chance(odd) then
		local at = math.random(0, #text)
		text = text:sub(1, at) .. draw(HOSTILE) .. text:sub(at + 1)
	end
	return text
end

-- Some jobs are odd in everything, most in one thing or none: these get far.
local function random_job()
	local odd = draw({ 0, 1, 3, 12 })
	local job = { requeue = chance(odd) and 0 or 65534, script = "#!/bin/sh\n" }
	for _, name in ipairs(NUMBER_FIELDS) do
		job[name] = SHORT[name] or not name:match("^min_mem") and 4294967294 or nil
		if chance(odd) then
			job[name] = draw(NUMBERS)
		end
	end
	for _, name in ipairs(STRING_FIELDS) do
		job[name] = chance(odd) and draw(HOSTILE) or nil
	end
	for _, name in ipairs({ "tres_per_job", "tres_per_node", "tres_per_task", "tres_per_socket" }) do
		job[name] = chance(odd) and draw(GRES) or chance(odd / 4) and draw(HOSTILE) or nil
	end
	for name, pool in pairs({ req_nodes = NODES, reservation = RESERVATIONS,
		admin_comment = FORGED }) do
		job[name] = chance(2 * odd) and draw(pool) or chance(odd / 4) and draw(HOSTILE) or nil
	end
	if chance(3 * odd) then
		job.script = draw({ "", "x" })
	end
	job.partition = chance(20) and draw({ "all", "small,large", "none", "no,such", ",,," }) or nil
	if chance(60) then
		job.spank_job_env = { [0] = "OTHER=1", "ELASTIC=" .. directive_text(odd) }
	elseif chance(40) then
		job.spank_job_env = { [0] = draw(HOSTILE) }
	end
	if chance(20) then
		job.comment = draw({ "elastic:", "elastic: ", "my ", "" }) .. directive_text(odd)
			.. draw(HOSTILE)
	end
	if chance(odd) then
		job.het_job_offset = draw({ 0, 1, 4294967294 })
	end
	return job
end

-- One job -----------------------------------------------------------------------------------------

local function has_directive(job)
	for _, setting in pairs(job.spank_job_env or {}) do
		if setting:match("^ELASTIC=") then
			return true
		end
	end
	return (job.comment or ""):match("^elastic:%S") ~= nil
end

local function is_reserved(job)
	return ("," .. (job.reservation or "")):match("[,%s]selastic_") ~= nil
end

local function shown(job)
	local words = {}
	for name, value in pairs(job) do
		local text = type(value) == "table" and table.concat(value, " ", 0) or tostring(value)
		words[#words + 1] = string.format("%s=%q", name, text:sub(1, 200))
	end
	table.sort(words)
	return table.concat(words, " ")
end

local function call(hook, ...)
	said, logged = {}, {}
	debug.sethook(function()
		debug.sethook()
		error("takes too long")
	end, "", MAX_INSTRUCTIONS)
	local result = hook(...)
	debug.sethook()
	assert(#logged == 0, logged[1])
	assert(result == slurm.SUCCESS or result == slurm.ERROR, "returns " .. tostring(result))
	assert(#said <= 1, "says two things")
	assert(not said[1] or said[1]:match("^elastic: [\32-\126]+$"), "says " .. tostring(said[1]))
	assert(result == slurm.SUCCESS or said[1], "refuses without a word")
	return result
end

local function try(job, uid)
	local desc, changed = description(job)
	local result = call(slurm_job_submit, desc, draw(PARTITIONS), uid)
	if is_reserved(job) and uid ~= 0 then
		assert(result == slurm.ERROR, "a reservation of the controller's is open to all")
	elseif not has_directive(job) and #(job.reservation or "") < 65536 then
		assert(result == slurm.SUCCESS, "blocks a job without a directive")
	end
	if not has_directive(job) or result == slurm.ERROR then
		for name, value in pairs(changed) do
			assert(name == "admin_comment" and value == "", "changes " .. name)
		end
	end
	if has_directive(job) and result == slurm.SUCCESS then
		assert(said[1], "says nothing")
		assert((changed.admin_comment ~= nil) == (job.script ~= "") or changed.admin_comment == "",
			"records wrongly")
	end
	local record = changed.admin_comment
	if record and record ~= "" then
		assert(#record <= 65536 and record:match("^[\32-\126]+$"), "an unsound record")
		if chance(5) then
			print((record:gsub(".", function(char)
				return string.format("%02x", char:byte())
			end)))
		end
	end
	result = call(slurm_job_modify, description(job), {}, {}, uid)
	assert((result == slurm.ERROR) == (is_reserved(job) and uid ~= 0
		or uid ~= 0 and #(job.reservation or "") > 65536), "modify answers " .. result)
	return result
end

dofile(directory .. "/job_submit.lua")
local refused, accepted = 0, 0
for number = 1, jobs do
	local job = random_job()
	local sound, fault = pcall(try, job, draw({ 0, 1000, 1000, 1000 }))
	if not sound then
		io.stderr:write(string.format("job %d of seed %d: %s: %s\n", number, seed, tostring(fault),
			shown(job)))
		os.exit(1)
	end
	accepted, refused = accepted + (fault == 0 and 1 or 0), refused + (fault == 0 and 0 or 1)
end
